"""A peer that is a library: a script in its environment runs batches, which it gets as JSON lines.

No scheduler stands before it: as many prompts as there are clients run as one batch, then the next batch.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from app.measure.closed_loop import Seen
from bench.kept import NotStarted
from bench.peers.cores import Cores
from bench.peers.load import Load
from bench.peers.offline import OFFLINE
from bench.peers.peer import Peer
from bench.peers.places import absent

_HERE = Path(__file__).parent


class Library(Peer):
    def __init__(
        self,
        name: str,
        venv: Path | None,
        model: Path | None,
        script: str,
        model_place: str,
        cores: Cores,
    ) -> None:
        """`name` and `model_place` name the places `venv` and `model`. `script`, beside this file, is called
        with the model and the number of threads."""
        super().__init__(name)
        self._venv = venv
        self._model_place = model_place
        self._script = str(_HERE / script)
        self._model = model
        self._cores = cores
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-bench-")
        self._child: subprocess.Popen[str] | None = None

    def missing(self) -> str | None:
        return absent(self.name, self._venv, "bin/python") or absent(self._model_place, self._model)

    def start(self) -> None:
        assert self._venv is not None
        threads, python = str(len(self._cores)), str(self._venv / "bin/python")
        self._log = (Path(self._folder.name) / "log").open("w+")
        self._child = subprocess.Popen(
            ["taskset", "-c", str(self._cores), python, self._script, str(self._model), threads],
            env=OFFLINE | {"OMP_NUM_THREADS": threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reply()

    def stop(self) -> None:
        if self._child is None:
            return
        self._child.kill()  # should this process be killed, the script ends with its stdin
        self._child.communicate()
        self._child = None
        self._log.close()

    def run(self, load: Load) -> Seen:
        prompts = load.prompts()
        first_s: list[float] = []
        gaps_s: list[float] = []
        start = time.perf_counter()
        for at in range(0, len(prompts), load.clients):
            batch = prompts[at : at + load.clients]
            reply = self._ask(batch, load.output_tokens)
            first_s += reply["first_s"]
            gaps_s += [gap for gap in reply["gaps_s"] for _ in batch]
        return Seen(time.perf_counter() - start, load.requests * load.output_tokens, first_s, gaps_s)

    def processes(self) -> list[tuple[str, psutil.Process]]:
        return [(self.name, psutil.Process(self._child.pid))] if self._child is not None else []

    def _ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdin is not None
        print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=self._child.stdin, flush=True)
        reply = self._reply()
        if len(reply["first_s"]) != len(prompts) or len(reply["gaps_s"]) != max_tokens - 1:
            raise RuntimeError(f"{self.name} did not produce {max_tokens} tokens for {len(prompts)} prompts")
        return reply

    def _reply(self) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._log.seek(0)
            raise NotStarted(f"{self.name} ended:\n{self._log.read()[-2000:]}")
        return dict(json.loads(line))
