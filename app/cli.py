"""The `kvrelay` command."""

import argparse
import os
import sys
from pathlib import Path

from app.launch import programs
from relay.routing import ROLES
from relay.settings import Settings


def main() -> None:
    """Parse the command line and run; never returns."""
    arguments = _parser().parse_args()
    try:
        settings = Settings.from_env()
        arguments.run(settings, arguments)
    except (ValueError, PermissionError) as error:
        print(f"kvrelay: {error}", file=sys.stderr)
        sys.exit(os.EX_CONFIG)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay",
        description="Serve a language model with prefill and decode on separate workers.",
        epilog="Settings come from the environment; docs/settings.md lists them.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="run everything on this machine and answer one question")
    up.set_defaults(run=_up)
    gateway = commands.add_parser("gateway", help="run the HTTP gateway")
    gateway.set_defaults(run=_gateway)
    worker = commands.add_parser("worker", help="run one worker")
    worker.add_argument("--role", choices=ROLES, help="what it serves; default: ROLE")
    worker.add_argument("--name", help="its name among the workers of this host; default: its role")
    worker.set_defaults(run=_worker)
    batches = commands.add_parser("batches", help="run a batch processor")
    batches.set_defaults(run=_batches)
    _add_batch(commands.add_parser("batch", help="run a file of requests, and look after such runs"))
    key = commands.add_parser("key", help="make an API key, and print it with the lines for API_KEYS_FILE")
    key.add_argument("name", help="whose it is")
    key.add_argument("--admin", action="store_true", help="it may also make admin calls")
    key.set_defaults(run=_key)
    flower = commands.add_parser("flower", help="run Flower, which shows the running legs")
    flower.set_defaults(run=_flower)
    return parser


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the gateway; default: http://HOST:PORT")
    parser.set_defaults(run=_batch)
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    run = actions.add_parser("run", help="upload, follow and fetch the answers; again after an interruption")
    run.add_argument("file", type=Path, help="requests, one JSON object a line")
    run.add_argument("-o", "--output", type=Path, help="answers; default: FILE with .output.jsonl")
    run.add_argument("--window", default="24h", help="when it expires, as 90m or 24h; default: %(default)s")
    actions.add_parser("list", help="your batches, newest first")
    for action, about in (("status", "show one batch"), ("cancel", "stop it and keep what is finished")):
        actions.add_parser(action, help=about).add_argument("batch_id")


def _up(settings: Settings, _: argparse.Namespace) -> None:
    from app.launch.up import Launcher

    sys.exit(Launcher(settings).run())


def _gateway(settings: Settings, _: argparse.Namespace) -> None:
    from app.gateway.keys import KeyRing

    KeyRing.from_settings(settings)  # a key file that cannot be used is told here, not in a traceback
    _become(programs.gateway_command(), {})


def _batches(settings: Settings, _: argparse.Namespace) -> None:
    from app.batch.batch_processor import BatchProcessor
    from relay import log

    log.configure()
    BatchProcessor(settings).serve()
    os._exit(0)  # at once: the threads of open lines have nothing to lose


def _batch(settings: Settings, arguments: argparse.Namespace) -> None:
    from app.commands.api_client import ApiAway, ApiClient, ApiRefused
    from app.commands.batch_command import BatchCommand

    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    url = arguments.url or f"http://{host}:{settings.port}"
    command = BatchCommand(ApiClient(url, settings.api_key))
    try:
        match arguments.action:
            case "run":
                sys.exit(command.run(arguments.file, arguments.output, arguments.window))
            case "list":
                sys.exit(command.list_all())
            case "status":
                sys.exit(command.status(arguments.batch_id))
            case "cancel":
                sys.exit(command.cancel(arguments.batch_id))
    except (ApiRefused, ApiAway, OSError) as error:
        print(f"kvrelay: {error}", file=sys.stderr)
        sys.exit(1)


def _key(_: Settings, arguments: argparse.Namespace) -> None:
    from app.gateway.keys import new_key, stanza

    key = new_key()
    print(f"{key}\n", file=sys.stderr)  # apart from the stanza, which `>> keys.toml` takes
    print(stanza(arguments.name, key, arguments.admin), end="")
    sys.exit(0)


def _worker(settings: Settings, arguments: argparse.Namespace) -> None:
    role = arguments.role or settings.role
    command = programs.worker_command(role, settings.model_name, arguments.name)
    _become(command, programs.worker_env(role))


def _flower(settings: Settings, _: argparse.Namespace) -> None:
    _become(programs.flower_command(settings.host, settings.flower_port), programs.flower_env(settings.host))


def _become(command: list[str], env: dict[str, str]) -> None:
    """Replace this process, so that signals reach the program itself."""
    os.execve(command[0], command, {**os.environ, **env})


if __name__ == "__main__":
    main()
