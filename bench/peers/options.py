"""What to compare, and where it is: the command line, and PEER_... variables for places."""

import argparse
import os
from pathlib import Path

from bench.peers.cores import Cores
from bench.peers.kvrelay import Kvrelay
from bench.peers.library import Library
from bench.peers.peer import Peer
from bench.peers.places import Places
from bench.peers.vllm import Vllm
from bench.peers.vllm_bench import VllmBench

SYSTEMS = ("kvrelay", "vllm", "llama", "transformers", "kvrelay-1p1d", "vllm-1p1d")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Exits with a message when an argument is not allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench peers", description="Compare kvrelay with its peers on this machine, in turns."
    )
    add = parser.add_argument
    add("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS, help="default: all that is here")
    add("--clients", nargs="*", type=int, default=[1, 4, 8, 16], help="requests at once")
    add("--repetitions", type=int, default=3)
    add("--first-repetition", type=int, default=0, help="prompts follow from the number of a repetition")
    add("--prompt-tokens", type=int, default=512)
    add("--output-tokens", type=int, default=128)
    add("--steady-s", type=float, default=0.0, help="also a steady stream, this long alone and disturbed")
    add("--long-tokens", type=int, default=1000, help="of the prompts that disturb it")
    add("--every-s", type=float, default=2.0, help="between prompts that disturb it")
    add("--client", choices=("own", "vllm"), default="own", help="vllm: `vllm bench serve` as it comes")
    add("--cores", type=Cores.parse, default=Cores.parse(""), help="as 0,1; for each system in its turn")
    add("--results", type=Path, default=Path("var/peers.json"), help="every run adds to this file")
    add("--plot", type=Path, help="an SVG or PNG of all results in the file")
    add("--lock", type=Path, help="a file to lock during each turn, for whoever shares the machine")
    for place, what in (
        ("model", "a Hugging Face folder in bfloat16"),
        ("gguf", "the same weights as BF16 GGUF"),
        ("vllm", "a virtual environment with vLLM"),
        ("llama", "one with llama-cpp-python"),
        ("transformers", "one with transformers; default: the one that runs this"),
    ):
        variable = f"PEER_{place.upper()}"
        add(f"--{place}", type=_place, default=os.environ.get(variable), help=f"{what}; also {variable}")
    return parser.parse_args(arguments)


def peers(options: argparse.Namespace) -> list[Peer]:
    """Those asked for, whether they are here or not."""
    here = Places(options.model, options.gguf, options.vllm, options.llama, options.transformers)
    cores: Cores = options.cores
    bench = (
        VllmBench(here.vllm, here.model) if options.client == "vllm" and here.vllm and here.model else None
    )
    every: list[Peer] = [
        Kvrelay("kvrelay", here, cores, apart=False, vllm_bench=bench),
        Vllm("vllm", here, cores, apart=False, vllm_bench=bench),
        Library("llama", here.llama, here.gguf, "llama_script.py", "gguf", cores),
        Library("transformers", here.transformers, here.model, "transformers_script.py", "model", cores),
        Kvrelay("kvrelay-1p1d", here, cores, apart=True, vllm_bench=bench),
        Vllm("vllm-1p1d", here, cores, apart=True, vllm_bench=bench),
    ]
    return [peer for peer in every if peer.name in options.systems]


def _place(text: str) -> Path:
    return Path(text).expanduser().absolute()
