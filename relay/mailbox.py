"""The mail of one incarnation of a worker: hints that say at once what the next renewal would say."""

from typing import Any, NamedTuple

from relay.packed import unpack_ints
from relay.redis_client import MAX_BLOCK_MS, blocking_client
from relay.request import Leg
from relay.rooms import root_key


class Published(NamedTuple):
    """To the prefill worker: these pages, from `first_page` of the request on, and this metadata row of
    `peer_boot` may be written. It has the pages before."""

    request_id: str
    room: int
    peer_boot: str
    nonce: str  # of the decode claim: the seal repeats it
    pages: tuple[int, ...]
    row: int
    first_page: int = 0


class Ready(NamedTuple):
    """To the decode worker: the KV is complete, the seal is in its row."""

    request_id: str
    room: int


class Ended(NamedTuple):
    """To an owner: the claim `nonce` on `leg` is over. `why`: cancelled, failed, requeued or expired."""

    request_id: str
    room: int
    leg: Leg  # PREFILL or DECODE; a claim on both legs ends as DECODE
    why: str
    nonce: str


class Ask(NamedTuple):
    """To a writer: can you still write into the pages that `boot` published in `room`?"""

    room: int
    boot: str


class Settled(NamedTuple):
    """To the decode worker: every handle posted for `room` is DONE, and it is closed to further ones."""

    room: int


class Offered(NamedTuple):
    """To a prefill or unified worker: this request is left to you for a moment, since you have the beginning
    of its prompt."""

    request_id: str


Mail = Published | Ready | Ended | Ask | Settled | Offered


class Mailbox:
    """Reads one worker's mail in order. For one thread; `close` after that thread has ended."""

    def __init__(self, url: str, model: str, boot: str) -> None:
        self._client = blocking_client(url)
        self._stream = f"{root_key(model)}:mail:{boot}"
        self._last = b"0-0"

    def read(self, block_ms: int = MAX_BLOCK_MS) -> list[Mail]:
        """The mail since the last call; waits up to `block_ms` for the first of it, 0 not at all.

        Raises redis-py's ConnectionError or TimeoutError when the server is away; a next call loses nothing.
        """
        assert 0 <= block_ms <= MAX_BLOCK_MS
        reply: Any = self._client.xread({self._stream: self._last}, block=block_ms or None)
        if not reply:
            return []
        ((_, entries),) = reply
        self._last = entries[-1][0]
        return [mail for _, fields in entries if (mail := _mail(fields))]

    def close(self) -> None:
        self._client.close()


def _mail(fields: dict[bytes, bytes]) -> Mail | None:
    match fields[b"event"]:
        case b"published":
            return Published(
                fields[b"id"].decode(),
                int(fields[b"room"]),
                fields[b"peer"].decode(),
                fields[b"nonce"].decode(),
                unpack_ints(fields[b"pages"]),
                int(fields[b"row"]),
                int(fields[b"first_page"]),
            )
        case b"ready":
            return Ready(fields[b"id"].decode(), int(fields[b"room"]))
        case b"ended":
            return Ended(
                fields[b"id"].decode(),
                int(fields[b"room"]),
                Leg(fields[b"leg"].decode()),
                fields[b"why"].decode(),
                fields[b"nonce"].decode(),
            )
        case b"ask":
            return Ask(int(fields[b"room"]), fields[b"boot"].decode())
        case b"settled":
            return Settled(int(fields[b"room"]))
        case b"offered":
            return Offered(fields[b"id"].decode())
        case _:
            return None  # from a newer version; it is a hint, and a renewal tells the same
