"""`python -m bench [NAME...]`: run the named benchmarks, or all of them, one after the other.

`python -m bench peers [...]` compares with other systems, if they are here; see bench/peers/README.md.
"""

import importlib
import sys

from app.measure.table import show
from bench import machine
from bench.peers import __main__ as peers

NAMES = (
    "start",
    "kernels",
    "accuracy",
    "overhead",
    "cost",
    "observed",
    "latency",
    "serving",
    "turns",
    "prefixes",
    "interference",
    "soak",
    "load",
    "traffic",
    "gateway",
    "batch",
)


def main() -> int:
    if sys.argv[1:2] == ["peers"]:
        return peers.main(sys.argv[2:])
    names = sys.argv[1:] or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}: choose from {', '.join(NAMES)}, peers; none for all")
        return 2
    print(machine.name())
    controls = machine.controls()
    show("Controls", ("threads", "read GB/s", "bf16 GFLOP/s"), [controls])
    for name in names:
        importlib.import_module(f"bench.{name}").run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
