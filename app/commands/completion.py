"""`kvrelay completion`."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print what makes a shell complete the words of this command.

    \b
    Examples:
      source <(kvrelay completion bash)                                  # in ~/.bashrc
      source <(kvrelay completion zsh)                                   # in ~/.zshrc, after compinit
      kvrelay completion fish > ~/.config/fish/completions/kvrelay.fish
    """
    from app.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "kvrelay", "_KVRELAY_COMPLETE").source()
    # Click's script for fish ends a description at its first comma.
    click.echo(script.replace('(string split ","', '(string split --max 1 ","'))
