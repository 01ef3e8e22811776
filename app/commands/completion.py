"""`kvrelay completion`."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print what makes a shell complete the words of this command.

    \b
    Examples:
      source <(kvrelay completion bash)                                  # in ~/.bashrc; zsh likewise
      kvrelay completion fish > ~/.config/fish/completions/kvrelay.fish
    """
    from app.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "kvrelay", "_KVRELAY_COMPLETE").source())
