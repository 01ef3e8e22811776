"""`kvrelay doctor`."""

import json
import sys
from collections.abc import Callable, Iterator

import click

from app.commands.options import no_color
from app.doctor.finding import Finding, fail, ok
from app.launch.display import Display
from relay.settings import Settings

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As a list of JSON objects.")
@no_color
def doctor(as_json: bool) -> int:
    """Find what would keep kvrelay from running well here.

    Each finding says what to do. The settings are those of the environment, as for the command that is to
    run. The exit status is 1 where something fails, else 0.

    \b
    Examples:
      kvrelay doctor
      REDIS_URL=redis://redis.internal/0 kvrelay doctor --json | jq '.[] | select(.level != "ok")'
    """
    found = []
    for finding in examine(Display(sys.stderr) if sys.stderr.isatty() else None):
        found.append(finding)
        if not as_json:
            level = click.style(f"{finding.level:4}", fg=_COLORS[finding.level])
            click.echo(f"{level}  {finding.subject:13}  {finding.what}")
            if finding.todo:
                click.echo(f"{'':21}→ {finding.todo}")
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in found], indent=2))
    return 1 if any(finding.level == "fail" for finding in found) else 0


def examine(display: Display | None) -> Iterator[Finding]:
    """All findings, in the order of their checks."""
    from app.doctor import engine, machine, model, redis_server

    try:
        settings = Settings.from_env()
    except ValueError as error:
        what, _, todo = str(error).partition("; ")
        yield fail("settings", what, todo)
        return
    yield ok("settings", "every variable can be read")
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        *(model.check_model, redis_server.check_server, redis_server.check_broker, engine.check_engine),
        *(machine.check_cores, machine.check_huge_pages, machine.check_limits, machine.check_shared_memory),
        *(machine.check_folders, machine.check_ports, machine.check_access),
    )
    for check in checks:
        if display:
            display.step("looking")
        found = list(check(settings))
        if display:
            display.clear()
        yield from found
