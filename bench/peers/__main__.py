"""`python -m bench peers [--clients 1 8] [--repetitions 3] ...`; README.md tells how to get the peers."""

import signal
import sys
from contextlib import ExitStack

from bench import machine
from bench.kept import NotStarted
from bench.peers.comparison import Comparison
from bench.peers.load import Steady
from bench.peers.options import parse, peers
from bench.peers.peer import Peer
from bench.peers.plot import plot
from bench.peers.report import report
from bench.peers.results import Results
from bench.peers.turn import Turn


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results = Results(options.results)
    print(machine.name(), flush=True)

    def tell(turn: Turn) -> None:
        results.add(turn)
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in turn.numbers.items())
        others = f"; the others used {turn.others_cpu_s:.2g} s of CPU" if turn.others_cpu_s >= 0.5 else ""
        print(f"{turn.repetition}  {turn.system}  {turn.clients or 'steady'}: {numbers}{others}", flush=True)

    with ExitStack() as stack:
        running = [peer for peer in peers(options) if _enter(stack, peer)]
        comparison = Comparison(running, options.lock, tell)
        comparison.warm_up(options.prompt_tokens)
        for repetition in range(options.first_repetition, options.first_repetition + options.repetitions):
            for clients in options.clients:
                comparison.load(clients, repetition, options.prompt_tokens, options.output_tokens)
            if options.steady_s:
                steady = Steady(options.steady_s, options.long_tokens, options.every_s, seed=-1 - repetition)
                comparison.steady(repetition, steady)
    report(results.turns)
    if options.plot is not None:
        plot(results.turns, options.plot, machine.name())
    return 0


def _enter(stack: ExitStack, peer: Peer) -> bool:
    """Start it, if it is here."""
    missing = peer.missing()
    if missing is None:
        print(f"starting {peer.name}", flush=True)
        try:
            stack.enter_context(peer)
            return True
        except NotStarted as error:
            missing = str(error)
    print(f"{peer.name} is left out: {missing}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
