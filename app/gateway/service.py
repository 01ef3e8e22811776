"""What the handlers of all resources work with."""

from collections.abc import Callable
from dataclasses import dataclass

from flask import current_app
from redis import Redis

from app.gateway.client import Departures
from app.gateway.errors import unavailable
from app.gateway.follow import Follower
from app.gateway.keys import KeyRing
from app.gateway.meters import Meters
from app.gateway.readiness import Readiness
from app.gateway.recent import Recent
from app.gateway.storage import Storage
from app.tracing.tracing import Tracing
from relay.batches import Batches
from relay.exposition import Registry
from relay.files import Files
from relay.grammar import Grammars
from relay.request import Ring
from relay.responses import Responses
from relay.rooms import Rooms
from relay.settings import Settings
from relay.tokenizer import Tokenizer
from relay.tokens import TokenReader

KEY = "kvrelay"


@dataclass(frozen=True, slots=True)
class Service:
    """One per process; threads share it. `context_tokens` is the longest prompt plus output."""

    settings: Settings
    model: str
    context_tokens: int
    started: int
    tokenizer: Tokenizer
    grammars: Grammars
    rooms: Rooms
    tokens: TokenReader
    follower: Follower
    departures: Departures
    meters: Meters
    cluster: Registry
    keys: KeyRing
    storage: Storage
    files: Files
    batches: Batches
    responses: Responses
    recent: Recent
    readiness: Readiness
    tracing: Tracing | None
    probe: Redis
    ring: Callable[[Ring], object]

    def check_free_thread(self) -> None:
        """A stream or poll keeps a thread. Raises ApiError when only those for short calls are left."""
        threads = self.settings.gateway_threads
        if self.follower.waiting() >= threads - max(2, threads // 16):
            raise unavailable(
                "Too many streams are open on this gateway. Try again later.", "too_many_streams"
            )

    def close(self) -> None:
        """End the threads and drop the connections."""
        self.follower.close()
        self.departures.close()
        self.readiness.close()
        if self.tracing is not None:
            self.tracing.close()
        self.rooms.close()
        self.tokens.close()
        self.probe.close()


def service() -> Service:
    """The service of the app that handles the current request."""
    found: Service = current_app.extensions[KEY]
    return found
