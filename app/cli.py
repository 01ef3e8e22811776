"""The `kvrelay` command: one file in `app/commands/` for each of its commands, read when it is needed."""

import os
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from app.commands.api_client import ApiAway, ApiRefused
from app.commands.options import no_color, without_color

COMMANDS = (
    *("up", "gateway", "worker", "batches", "flower"),
    *("submit", "result", "chat", "batch", "status", "bench"),
    *("doctor", "key", "completion", "healthy"),
)
INTERRUPTED = 130


class Commands(click.Group):
    """Each command is the function of its name in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"app.commands.{name}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if near := get_close_matches(args[0], COMMANDS, 1):
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", error.ctx) from None
            raise


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Settings come from the environment; docs/settings.md lists them, docs/cli.md the exit codes.",
)
@click.version_option(package_name="kvrelay", message="%(prog)s %(version)s")
@no_color
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Serve a language model with prefill and decode on separate workers."""
    if without_color(os.environ):
        ctx.color = False


def main() -> None:
    """Parse the command line and run; never returns. A command returns its exit status; None is 0."""
    try:
        status = cli.main(prog_name="kvrelay", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except click.Abort:
        status = INTERRUPTED
    except ApiRefused as refused:
        status = _told(refused, 1)
    except ApiAway as away:
        status = _told(away, os.EX_UNAVAILABLE)
    except (ValueError, PermissionError) as error:
        status = _told(error, os.EX_CONFIG)
    except BrokenPipeError:  # whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        status = _told(error, 1)
    sys.exit(status)


def _told(error: Exception, status: int) -> int:
    click.echo(f"kvrelay: {error}", err=True)
    return status


if __name__ == "__main__":
    main()
