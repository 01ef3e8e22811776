"""kvrelay: one unified worker on all cores, or one prefill and one decode worker on half of them each."""

import psutil

from bench.peers.cores import Cores
from bench.peers.places import Places, absent
from bench.peers.served import MODEL, Served
from bench.peers.vllm_bench import VllmBench
from bench.system import System

_LAYOUTS = {
    False: {"PREFILL_WORKERS": "0", "DECODE_WORKERS": "0", "UNIFIED_WORKERS": "1"},
    True: {"PREFILL_WORKERS": "1", "DECODE_WORKERS": "1", "UNIFIED_WORKERS": "0"},
}


class Kvrelay(Served):
    def __init__(
        self, name: str, places: Places, cores: Cores, apart: bool, vllm_bench: VllmBench | None
    ) -> None:
        """`apart`: prefill and decode, half of the cores each."""
        super().__init__(name, vllm_bench)
        self._model = places.model
        self._env = {"SERVED_NAME": MODEL, "MODEL": str(places.model), "CORES": str(cores), **_LAYOUTS[apart]}
        self._system: System | None = None

    def missing(self) -> str | None:
        return absent("model", self._model, "config.json")

    def start(self) -> None:
        system = System(**self._env)
        system.__enter__()
        self._system = system
        self.url = system.url

    def stop(self) -> None:
        if self._system is not None:
            self._system.__exit__(None)
            self._system = None

    def processes(self) -> list[tuple[str, psutil.Process]]:
        return list(self._system.processes().items()) if self._system is not None else []
