"""Workers of one model on hosts of their own, around a Redis on a third."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from relay.request import State
from tests.hosts.network import Host, Network
from tests.processes import until
from tests.relay_rig import Answer, Relay, WorkerProcess, tiny_model
from tests.servers import RedisServer, valkey_binary

# Little to compute and much to send: 96 KiB of KV a token.
HEAVY = {
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
LONG_TOKENS = 600
MBIT_PER_S = 400  # so a long prompt is a second on its way
MID_TRANSFER_BYTES = 20 << 20
HOW: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


class Stage:
    """Redis on `front`, a worker each on `prefill` and `decode`."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self._folder = folder

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.front, self.prefill, self.decode = map(self.network.add, ("front", "prefill", "decode"))
            self.server = stack.enter_context(
                RedisServer(
                    valkey_binary(),
                    self._folder / "valkey",
                    options=["--protected-mode", "no"],
                    address=self.front.address,
                    inside=self.front.inside(),
                )
            )
            model = tiny_model(self._folder / "heavy", **HEAVY)
            self.relay = Relay(self.server, self._folder, "heavy", MODEL=str(model))
            stack.callback(self.relay.close)
            self.writer = self.start("prefill", self.prefill)
            self.reader = self.start("decode", self.decode)
            self.relay.ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, role: str, host: Host, **env: str) -> WorkerProcess:
        (worker,) = self.relay.start(role, inside=host.inside(), **env)
        return worker

    def submit(self, *seeds: int) -> list[str]:
        """Their KV travels as if they came for the first time."""
        self.relay.forget()
        return [self.relay.submit(prompt(seed), **HOW) for seed in seeds]

    def wait(self, ids: list[str]) -> list[Answer]:
        answers = [self.relay.wait(request_id) for request_id in ids]
        assert {answer.end.state for answer in answers} == {State.FINISHED}
        return answers

    def mid_transfer(self, host: Host) -> None:
        """Return when `host` has sent some of a prompt and has more to send."""
        before = host.sent_bytes()
        until(lambda: host.sent_bytes() > before + MID_TRANSFER_BYTES, f"{host.name} sends")

    def quarantined_pages(self) -> int:
        return sum(card.load.quarantined_pages for card in self.relay.cards())


def prompt(seed: int) -> tuple[int, ...]:
    return tuple(5 + (seed * 31 + i * (7 + seed)) % 120 for i in range(LONG_TOKENS))
