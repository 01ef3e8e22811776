"""`python -m tests.clients [NAME...]`: install each client, start kvrelay, run them, compare the counts."""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from relay.model_file import default_model_path
from tests.clients.benchmarks import aiperf, guidellm, sglang, vllm
from tests.clients.command_line import llm
from tests.clients.environment import HERE, ROOT, InstallFailed, environment
from tests.clients.lm_eval import lm_eval
from tests.clients.model_folder import write_model_folder
from tests.clients.report import Report, Site
from tests.clients.sdk import openai
from tests.clients.server import MODEL, Served, Server

CLIENTS: dict[str, Callable[[Site], list[Report]]] = {
    "openai": openai,
    "llm": llm,
    "lm-eval": lm_eval,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "sglang": sglang,
    "vllm": vllm,
}
# Those that only know what the server tells them: the model is served as it comes, and no folder is written.
ONLY_ASK = {"openai", "llm"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; none: all")
    names = parser.parse_args().names or list(CLIENTS)
    if unknown := set(names) - CLIENTS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        model = default_model_path() if ONLY_ASK.issuperset(names) else _model_folder()
        with Server(model, base) as server:
            for name in names:
                failed |= not _run(name, server, model, base)
    return int(failed)


def _model_folder() -> Path:
    folder = ROOT / "build" / "clients" / "model"
    if not (folder / "tokenizer.json").exists():
        write_model_folder(folder)
    return folder


def _run(name: str, server: Server, model: Path, base: Path) -> bool:
    """Whether it went well, or could not be tried here."""
    try:
        found = _bin(name)
    except InstallFailed as error:
        print(f"{name:10} not installed: {error}", flush=True)
        return False
    if found is None:
        print(f"{name:10} skipped: install it and set {_variable(name)} to its bin folder", flush=True)
        return True
    out = base / name
    out.mkdir()
    began = time.monotonic()
    try:
        reports = CLIENTS[name](Site(found, server.url, MODEL, model, out))
        served = server.served()
        _compare(reports, served)
    except AssertionError as error:
        print(f"{name:10} FAILED: {error}", flush=True)
        return False
    print(
        f"{name:10} passed: {served.requests} requests, {served.prompt_tokens} prompt and"
        f" {served.completion_tokens} output tokens, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return True


def _compare(reports: list[Report], served: Served) -> None:
    """The client and the server agree, to the token where the client counts them."""
    assert not served.unfinished, f"not finished: {served.unfinished}"
    assert sum(report.requests for report in reports) == served.requests, (reports, served)
    for name in ("prompt_tokens", "output_tokens"):
        counts = [getattr(report, name) for report in reports]
        server = served.prompt_tokens if name == "prompt_tokens" else served.completion_tokens
        assert -1 in counts or sum(counts) == server, (name, reports, served)


def _bin(name: str) -> Path | None:
    """Of an environment that the user has, else of one that is made for it."""
    if given := os.environ.get(_variable(name)):
        return Path(given)
    return environment(name) if (HERE / "requirements" / f"{name}.txt").exists() else None


def _variable(name: str) -> str:
    return f"{name.upper().replace('-', '_')}_BIN"


if __name__ == "__main__":
    sys.exit(main())
