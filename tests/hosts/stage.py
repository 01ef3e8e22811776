"""Workers of one model on hosts of their own, around a Redis on a third."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tests.hosts.network import Network
from tests.relay_rig import Answer, Relay, tiny_model
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
MBIT_PER_S = 200  # a long prompt is two seconds on its way
WAYS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


class Stage:
    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            front, self.prefill, self.decode = (self.network.add(n) for n in ("front", "prefill", "decode"))
            self.front = front
            self.server = stack.enter_context(
                RedisServer(
                    valkey_binary(),
                    self.folder / "valkey",
                    options=["--protected-mode", "no"],
                    address=front.address,
                    inside=front.inside(),
                )
            )
            model = tiny_model(self.folder / "heavy", **HEAVY)
            self.relay = Relay(self.server, self.folder, "heavy", MODEL=str(model), LOG_LEVEL="DEBUG")
            stack.callback(self.relay.close)
            self.relay.start("prefill", inside=self.prefill.inside())
            self.relay.start("decode", inside=self.decode.inside())
            self.relay.ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prompt(self, seed: int, tokens: int = LONG_TOKENS) -> tuple[int, ...]:
        return tuple(5 + (seed * 31 + i * (7 + seed)) % 120 for i in range(tokens))

    def ask(self, seed: int) -> Answer:
        return self.relay.ask(self.prompt(seed), **WAYS)
