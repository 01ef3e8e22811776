"""The KV cache by sequence: which pages each holds, and which it finds that others have computed."""

from collections import Counter
from collections.abc import Iterable, Iterator

from workers.engine.pages import PagePool
from workers.engine.policy import pages_for
from workers.engine.prefix import PrefixCache
from workers.engine.sequence import Sequence


class KVCache:
    """Composes the pages of a pool and its prefix cache. Whether and when is the scheduler's.

    A sequence holds its `pages` from `admit` or `reserve` to `release`, or for as long as a step that was
    launched writes to them: a peer's write would not wait for it.
    """

    def __init__(self, total_pages: int, page_size: int, salt: bytes) -> None:
        self.pool = PagePool(total_pages)
        self.leaving: list[Sequence] = []  # released, and still written to
        self._page_size = page_size
        self._prefixes = PrefixCache(self.pool, page_size, salt)
        self._receiving: dict[str, Sequence] = {}  # by key; a peer writes its pages behind the cached ones

    @property
    def available_pages(self) -> int:
        """Free, or cached and held by nobody."""
        return self._prefixes.available_pages

    def clear(self) -> None:
        """Forget all prefixes. A running sequence's come to be known again as it goes on."""
        self._prefixes.clear()

    # ---- pages that a peer writes

    @property
    def receiving(self) -> int:
        """For how many legs."""
        return len(self._receiving)

    def reserve(self, sequence: Sequence, spare_pages: int) -> bool:
        """Hold the pages that are computed already, and new ones, which a peer writes; False if fewer than
        `spare_pages` would be left to give. Also the last may be one of those: the peer chooses the token
        that follows, and tells the scores."""
        found = self._prefixes.match(sequence.digests)
        if not self._acquire(sequence, found, spare_pages):
            return False
        self._receiving[sequence.key] = sequence
        return True

    def received(self, sequence: Sequence) -> list[int]:
        """Of its reserved pages those that a peer writes: from the end of the cached ones on."""
        return sequence.pages[self.first_received(sequence) :]

    def first_received(self, sequence: Sequence) -> int:
        return sequence.cached_tokens // self._page_size

    def join(self, key: str) -> Sequence | None:
        """The reserved pages of this sequence hold all its tokens now. None: it was dropped meanwhile."""
        sequence = self._receiving.pop(key, None)
        if sequence is not None:
            sequence.computed_tokens = sequence.launched_tokens = sequence.tokens
            self.share(sequence)
        return sequence

    def drop_reserved(self, key: str, quarantine: int | None) -> bool:
        """Free them, or put those that a peer may write aside under a room until `prove`. False: this leg has
        none."""
        sequence = self._receiving.pop(key, None)
        if sequence is None:
            return False
        if quarantine is None:
            self._prefixes.release(sequence.pages)
        else:
            self.pool.quarantine(quarantine, self.received(sequence))
            self._prefixes.release(sequence.pages[: self.first_received(sequence)])
        return True

    def prove(self, room: int) -> None:
        """No write of this room can come any more."""
        self.pool.prove(room)

    # ---- pages of a sequence

    def know(self, sequence: Sequence, tokens: int) -> None:
        """By what the prefix cache knows the whole pages of its first `tokens` tokens."""
        known = len(sequence.digests) * self._page_size
        if tokens - known >= self._page_size:
            whose = sequence.work.params.cache_salt
            more = sequence.token_ids(known, tokens // self._page_size * self._page_size)
            sequence.digests += self._prefixes.chain(sequence.digests, more, whose)

    def find(self, sequence: Sequence) -> list[int]:
        """The pages of its prefix that are computed already, and its own only after `admit`.

        At least one token is computed: its logits choose the next. What is cached has none, for scores.
        """
        most_pages = 0 if sequence.scored else (sequence.tokens - 1) // self._page_size
        return self._prefixes.match(sequence.digests[:most_pages])

    def admit(self, sequence: Sequence, found: list[int], spare_pages: int) -> bool:
        """Hold what was `found` and new pages for all other tokens; False if fewer than `spare_pages` would
        be left to give."""
        if not self._acquire(sequence, found, spare_pages):
            return False
        sequence.computed_tokens = sequence.launched_tokens = sequence.cached_tokens
        return True

    def _acquire(self, sequence: Sequence, found: list[int], spare_pages: int) -> bool:
        count = pages_for(sequence.tokens, self._page_size) - len(found)
        pages = self._prefixes.acquire(found, count, spare_pages)
        if pages is None:
            return False
        sequence.pages, sequence.cached_tokens = pages, len(found) * self._page_size
        return True

    def missing_pages(self, sequence: Sequence) -> int:
        """That its next token needs."""
        tokens = sequence.tokens + sequence.unread_tokens
        return max(0, pages_for(tokens, self._page_size) - len(sequence.pages))

    def extend(self, sequence: Sequence) -> bool:
        """By a page. False: there is none to give."""
        pages = self._prefixes.acquire([], 1)
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def share(self, sequence: Sequence) -> None:
        """Let others find the whole pages that are computed."""
        self.know(sequence, sequence.computed_tokens)
        whole = sequence.computed_tokens // self._page_size
        self._prefixes.insert(sequence.digests[:whole], sequence.pages[:whole])

    def release(self, sequence: Sequence) -> None:
        """The one way out: its whole computed pages stay cached, unless what is in them is wrong."""
        if sequence.failed:
            self._prefixes.forget(sequence.pages)
        else:
            self.share(sequence)
        self.leaving.append(sequence)
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give the pages of a released sequence back, once no launched step writes to them."""
        if not sequence.flying:
            self.leaving.remove(sequence)
            self._prefixes.release(sequence.pages)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise IntegrityError unless each page is in one state and each reference has its owner: one of
        these, one that leaves, or one that a peer brings; and if a page that a peer writes can be found."""
        self._prefixes.check(Counter(self._held(sequences)))
        self._prefixes.check_unknown(
            page for sequence in self._receiving.values() for page in self.received(sequence)
        )

    def _held(self, sequences: Iterable[Sequence]) -> Iterator[int]:
        for sequence in (*sequences, *self.leaving, *self._receiving.values()):
            yield from sequence.pages
