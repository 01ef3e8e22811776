"""`make chaos SEED=7 N=50`: a schedule of faults under load. The same seed gives the same schedule."""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.cluster import Cluster
from tests.chaos.faults import schedule
from tests.chaos.load import prompts, undisturbed
from tests.chaos.run import waves


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of the prompts")
    parser.add_argument("--n", type=int, default=20, help="how many faults")
    parser.add_argument("--fsync", choices=("everysec", "always"), default="everysec", help="of Valkey's AOF")
    options = parser.parse_args()

    faults = schedule(options.seed, options.n)
    print(f"seed {options.seed}, {options.n} faults:")
    for fault in faults:
        print(f"  {fault}")
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-chaos-"))
    print(f"logs: {folder}")
    started = time.monotonic()
    happened = missed = 0
    problems: list[str] = []
    with Cluster(folder, fsync=options.fsync) as cluster:
        load = prompts(options.seed)
        for number, wave in enumerate(waves(cluster, load, undisturbed(cluster, load), faults), 1):
            print(f"wave {number}: {'FAILED' if wave.problems else 'held'}", flush=True)
            happened += wave.happened
            missed += wave.missed
            problems += wave.problems
    print(
        f"{happened} faults happened, {missed} found nobody, {len(problems)} problems, "
        f"{time.monotonic() - started:.0f} s"
    )
    if problems:
        print(f"FAILED. Again: make chaos SEED={options.seed} N={options.n}; logs: {folder}")
        return 1
    shutil.rmtree(folder)
    print("Every text is that of the undisturbed run, and nothing leaked.")
    return 0


sys.exit(main())
