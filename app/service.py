"""What the handlers of all resources work with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flask import current_app
from redis import Redis

from app.follow import Follower
from relay.request import Ring
from relay.rooms import Rooms
from relay.settings import Settings
from relay.tokenizer import Tokenizer
from relay.tokens import TokenReader

if TYPE_CHECKING:
    from app.metrics import Metrics

KEY = "kvrelay"


@dataclass(frozen=True, slots=True)
class Service:
    """One per process; threads share it. `context_tokens` is the longest prompt plus output."""

    settings: Settings
    model: str
    context_tokens: int
    started: int
    tokenizer: Tokenizer
    rooms: Rooms
    tokens: TokenReader
    follower: Follower
    metrics: "Metrics"
    probe: Redis
    ring: Callable[[Ring], object]

    def close(self) -> None:
        """End the reader thread and drop the connections."""
        self.follower.close()
        self.rooms.close()
        self.tokens.close()
        self.probe.close()


def service() -> Service:
    """The service of the app that handles the current request."""
    found: Service = current_app.extensions[KEY]
    return found
