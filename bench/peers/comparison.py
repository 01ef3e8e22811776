"""The systems in turns, A B A B, each alone on the cores while it is its turn."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path

from bench.peers.load import Load, Steady
from bench.peers.peer import Peer
from bench.peers.served import Served
from bench.peers.turn import STEADY, Turn, load_numbers, steady_numbers

_REST_S = 0.5  # for what the last turn left to do
_WARM_SEED = 1_000_000


class Comparison:
    def __init__(self, peers: Sequence[Peer], lock: Path | None, tell: Callable[[Turn], None]) -> None:
        """All `peers` run. `lock` is held during each turn; `tell` gets each turn as it ends."""
        self._peers = peers
        self._lock = lock
        self._tell = tell
        self._run = time.strftime("%Y-%m-%dT%H:%M:%S")

    def warm_up(self, prompt_tokens: int) -> None:
        """The first requests of a server pay for what later ones find."""
        for peer in self._peers:
            with self._quiet():
                peer.run(Load(2, 2, prompt_tokens, 8, _WARM_SEED))

    def load(self, clients: int, repetition: int, prompt_tokens: int, output_tokens: int) -> None:
        """The same prompts for each of them, and none twice: what is cached helps nobody."""
        load = Load.of(clients, prompt_tokens, output_tokens, seed=1000 * repetition + clients)
        for peer in self._peers:
            with self._quiet():
                before, others_before = self._cpu_s(peer), self._others_cpu_s(peer)
                seen = peer.run(load)
                after, others_after = self._cpu_s(peer), self._others_cpu_s(peer)
            per_token = {name: 1e3 * (after[name] - before.get(name, 0.0)) / seen.tokens for name in after}
            numbers = load_numbers(seen)
            self._tell(
                Turn(
                    self._run,
                    repetition,
                    peer.name,
                    clients,
                    numbers,
                    per_token,
                    others_after - others_before,
                )
            )

    def steady(self, repetition: int, steady: Steady) -> None:
        for peer in self._peers:
            if isinstance(peer, Served):
                with self._quiet():
                    others_before = self._others_cpu_s(peer)
                    numbers = steady_numbers(peer.run_steady(steady))
                    others_s = self._others_cpu_s(peer) - others_before
                self._tell(Turn(self._run, repetition, peer.name, STEADY, numbers, others_cpu_s=others_s))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Alone on the machine, as far as others heed the lock."""
        if self._lock is None:
            time.sleep(_REST_S)
            yield
            return
        with self._lock.open("a") as held:
            flock(held, LOCK_EX)
            time.sleep(_REST_S)
            yield

    def _cpu_s(self, peer: Peer) -> dict[str, float]:
        times = os.times()
        return peer.cpu_s() | {"client": times.user + times.system}

    def _others_cpu_s(self, peer: Peer) -> float:
        return sum(sum(other.cpu_s().values()) for other in self._peers if other is not peer)
