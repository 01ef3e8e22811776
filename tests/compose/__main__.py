"""`make compose-test`: the containers of docker-compose.yml on a real engine, disturbed while clients wait.

Exit status 77 of `engine.sh` means that no engine can be had here; then nothing is tested, and that is told.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from app.launch.sample import ask
from tests.compose.load import Load
from tests.compose.stack import PORT, Stack, image_bytes, until

ENGINE = Path(__file__).with_name("engine.sh")
NO_ENGINE = 77
ANSWERS_BETWEEN = 6  # the load goes on well before the next disturbance
MOST_IMAGE_BYTES = 1_600_000_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and nothing is left running
    try:
        status = subprocess.run([ENGINE, "start"]).returncode
        if status == NO_ENGINE:
            print("skipped: the containers need a Docker engine")
        elif status == 0:
            run(Stack(), seed)
    finally:
        subprocess.run([ENGINE, "stop"], check=True)
    return 0 if status == NO_ENGINE else status


def run(stack: Stack, seed: int) -> None:
    timed("build the image", stack.build)
    size = image_bytes(os.environ.get("IMAGE", "kvrelay"))
    print(f"          {size / 1e9:.2f} GB")
    assert size <= MOST_IMAGE_BYTES, "the image has grown beyond its limit"
    stack.down("-v", "--remove-orphans")
    try:
        timed("up to the first answer", lambda: first_answer(stack))
        disturb(stack, seed)
    except BaseException:
        print(stack.compose("logs", "--tail", "40", "--no-color"), file=sys.stderr)
        raise
    finally:
        timed("down", lambda: stack.down("-v"))


def first_answer(stack: Stack) -> None:
    stack.up()
    stack.ready()
    ask(f"http://127.0.0.1:{PORT}", "", lambda: None)


def disturb(stack: Stack, seed: int) -> None:
    load = Load(stack.client, seed)
    for said, disturbance in (
        ("crash the decode worker", lambda: stack.crash(stack.containers("decode")[0])),
        ("crash the prefill worker", lambda: stack.crash(stack.containers("prefill")[0])),
        ("another gateway", lambda: renew(stack, "gateway")),
        ("another Redis, the same data", lambda: renew(stack, "redis")),
        ("crash Redis", lambda: stack.crash(stack.containers("redis")[0])),
        ("two decode workers", lambda: scale(stack, 2)),
        ("crash one of the two", lambda: stack.crash(stack.containers("decode")[0])),
        ("one decode worker", lambda: scale(stack, 1)),
        ("restart the prefill worker", lambda: stack.compose("restart", "prefill")),
        ("everything down and up", lambda: everything(stack)),
    ):
        timed(said, partial(settled, stack, load, disturbance))
    answered = load.stop()
    timed("all pages are back", stack.all_pages_back)
    for service in ("redis", "prefill", "decode", "gateway", "flower"):
        stack.healthy(service)
    print(f"{answered} requests: none lost, none doubled, all texts those of the undisturbed run")


def settled(stack: Stack, load: Load, disturbance: Callable[[], object]) -> None:
    """Disturb, and wait until clients are answered again."""
    disturbance()
    stack.ready()
    answered = load.answered
    until(lambda: load.answered >= answered + ANSWERS_BETWEEN, "requests are answered again")
    load.check()


def renew(stack: Stack, service: str) -> None:
    stack.remove(service)
    stack.up()


def scale(stack: Stack, workers: int) -> None:
    stack.up(f"decode={workers}")
    until(lambda: stack.workers("decode") == workers, f"{workers} decode workers are registered")


def everything(stack: Stack) -> None:
    """With requests open, which Redis finds on its disk again."""
    stack.down()
    stack.up()


def timed(said: str, what: Callable[[], object]) -> None:
    began = time.monotonic()
    what()
    print(f"{time.monotonic() - began:6.1f} s  {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
