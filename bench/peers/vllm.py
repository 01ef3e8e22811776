"""vLLM's CPU build: one engine on all cores, or prefill and decode apart over NIXL behind a proxy."""

import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import httpx
import psutil

from bench.kept import Kept
from bench.peers.cores import Cores
from bench.peers.offline import OFFLINE
from bench.peers.places import Places, absent
from bench.peers.served import MODEL, Served
from bench.peers.vllm_bench import VllmBench
from bench.system import free_port

START_S = 600.0
CONTEXT_TOKENS = 8192
_HERE = Path(__file__).parent
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
_FLAGS = ("--dtype", "bfloat16", "--host", "127.0.0.1", "--max-num-seqs", "32")


class Vllm(Served):
    def __init__(
        self, name: str, places: Places, cores: Cores, apart: bool, vllm_bench: VllmBench | None
    ) -> None:
        """`apart`: prefill and decode, half of the cores each."""
        super().__init__(name, vllm_bench)
        self._places = places
        self._cores = cores
        self._apart = apart
        self._kept: dict[str, Kept] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-bench-")

    def missing(self) -> str | None:
        here = self._places
        return absent("vllm", here.vllm, "bin/vllm") or absent("model", here.model, "config.json")

    def start(self) -> None:
        if not self._apart:
            self.url = self._engine("engine", self._cores, (), {})
            self._wait("engine", self.url)
            return
        urls = {
            role: self._half(role, cores, kind)
            for role, cores, kind in zip(
                ("prefill", "decode"), self._cores.halves(), ("kv_producer", "kv_consumer")
            )
        }
        for role, url in urls.items():
            self._wait(role, url)
        self.url = self._proxy(**urls)
        self._wait("proxy", self.url)

    def stop(self) -> None:
        for kept in self._kept.values():
            kept.ask_to_stop()
        while self._kept:
            self._kept.popitem()[1].stop()

    def processes(self) -> list[tuple[str, psutil.Process]]:
        return [
            (f"{name} {number}" if number else name, process)
            for name, kept in self._kept.items()
            for number, process in enumerate(kept.processes())
        ]

    def _half(self, role: str, cores: Cores, kind: str) -> str:
        # The connector would put every engine on the last core, and NIXL's progress thread would spin on
        # it: with both, two engines on two cores are three times as slow. So each keeps its cores.
        connector = {
            "kv_connector": "NixlConnector",
            "kv_role": kind,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"num_threads": 0},
        }
        env = {
            "PYTHONPATH": str(_HERE / "vllm_site"),
            "PEER_KEEP_CORES": str(cores),
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        return self._engine(role, cores, ("--kv-transfer-config", json.dumps(connector)), env)

    def _engine(self, name: str, cores: Cores, flags: tuple[str, ...], env: Mapping[str, str]) -> str:
        """Start a server; its URL."""
        assert self._places.vllm is not None
        libraries = (_TCMALLOC, self._places.vllm / "lib/libiomp5.so")  # as vLLM's manual asks for
        port = free_port()
        command = [
            *(
                "taskset",
                "-c",
                str(cores),
                str(self._places.vllm / "bin/vllm"),
                "serve",
                str(self._places.model),
            ),
            *("--served-model-name", MODEL, "--port", str(port)),
            *("--max-model-len", str(CONTEXT_TOKENS), *_FLAGS, *flags),
        ]
        self._start(
            name,
            command,
            {
                "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(cores),
                **env,
            },
        )
        return f"http://127.0.0.1:{port}"

    def _proxy(self, prefill: str, decode: str) -> str:
        assert self._places.vllm is not None
        port = free_port()
        python, script = str(self._places.vllm / "bin/python"), str(_HERE / "vllm_proxy.py")
        self._start("proxy", [python, script, str(port), prefill, decode], {})
        return f"http://127.0.0.1:{port}"

    def _start(self, name: str, command: list[str], env: Mapping[str, str]) -> None:
        log = Path(self._folder.name) / f"{name}.log"
        self._kept[name] = Kept(command, OFFLINE | dict(env), log)

    def _wait(self, name: str, url: str) -> None:
        self._kept[name].wait_until(partial(_healthy, url), START_S)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
