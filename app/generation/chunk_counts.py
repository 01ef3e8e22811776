"""How many chunks of each choice a client has: what it says when it comes again, to whichever gateway."""

from app.gateway.arguments import last_events
from app.gateway.errors import position_ahead


class ChunkCounts:
    """Of the answer to the current request.

    Chunks are named where its client may come again: the request has a key. Others are not, since clients
    that expect `data:` at the beginning of each event would lose them.
    """

    def __init__(self, choices: int, named: bool) -> None:
        """Raises ApiError for a Last-Event-ID that is none."""
        self._named = named
        self._seen = last_events(choices)
        self._sent = [0] * choices

    @property
    def resumed(self) -> bool:
        """The client has the beginning."""
        return self._seen is not None

    def count(self, choice: int) -> bool:
        """One more chunk. False: the client has it."""
        self._sent[choice] += 1
        return self._seen is None or self._sent[choice] > self._seen[choice]

    def check_end(self) -> None:
        """All are counted. Raises ApiError when the client says to have more than there are."""
        for there, seen in zip(self._sent, self._seen or self._sent, strict=True):
            if seen > there:
                raise position_ahead(there, seen, "chunks")

    def name(self) -> str:
        """The line before the next chunk."""
        has = map(max, self._sent, self._seen or self._sent)
        return f"id: {'.'.join(map(str, has))}\n" if self._named else ""
