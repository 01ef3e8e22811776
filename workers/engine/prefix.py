"""The prefix cache: finds pages whose KV is already there by what was computed into them.

A page is known by a digest over its tokens and the digest of the page before it, so equal digests mean equal
prefixes, and the whole forms a tree without storing one. (Source: vLLM's automatic prefix caching.)
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from workers.engine.pages import IntegrityError, PagePool

Digest = bytes

_DIGEST_BYTES = 16


class PrefixCache:
    """Whole pages only: a partial tail page has no digest, so it is never shared."""

    def __init__(self, pool: PagePool, page_size: int, salt: bytes) -> None:
        """`salt` names what else the KV depends on: model, weights, dtype."""
        self._pool = pool
        self._page_size = page_size
        self._salt = salt
        self._pages: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}  # page -> digest, the inverse of _pages

    @property
    def available_pages(self) -> int:
        """What `acquire` can give."""
        return self._pool.free_pages + self._pool.cached_pages

    def chain(
        self, digests: Sequence[Digest], tokens: Sequence[int], whose: str | None = None
    ) -> list[Digest]:
        """Digests of the whole pages in `tokens`, which follow the pages of `digests`. What is chained for
        somebody (a request's `cache_salt`) is found by nobody else."""
        packed, page_bytes = array("i", tokens).tobytes(), self._page_size * array("i").itemsize
        parent = digests[-1] if digests else self._root(whose)
        added: list[Digest] = []
        for start in range(0, len(packed) - page_bytes + 1, page_bytes):
            parent = blake2b(parent + packed[start : start + page_bytes], digest_size=_DIGEST_BYTES).digest()
            added.append(parent)
        return added

    def _root(self, whose: str | None) -> Digest:
        owner = b"" if whose is None else b"\0" + whose.encode()
        return blake2b(self._salt + owner, digest_size=_DIGEST_BYTES).digest()

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """Pages of the longest known prefix. They are the caller's only after `acquire`."""
        pages: list[int] = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, matched: Sequence[int], count: int, spare: int = 0) -> list[int] | None:
        """Hold the `matched` pages and `count` new ones, evicting what that takes; None if fewer than `spare`
        would be left to give."""
        if count + spare > self.available_pages - sum(map(self._pool.is_cached, matched)):
            return None
        self._pool.share(matched)
        missing = count - self._pool.free_pages
        if missing > 0:
            self.forget(self._pool.evict(missing))
        return [*matched, *self._pool.allocate(count)]

    def insert(self, digests: Sequence[Digest], pages: Sequence[int]) -> None:
        """Make held pages known whose content is computed or sealed. A known digest keeps its page."""
        for digest, page in zip(digests, pages, strict=True):
            if digest not in self._pages and page not in self._digests:
                self._pages[digest] = page
                self._digests[page] = digest

    def forget(self, pages: Sequence[int]) -> None:
        """Nobody shall match these pages any more: their content is not what their tokens say."""
        for page in pages:
            if page in self._digests:
                del self._pages[self._digests.pop(page)]

    def clear(self) -> None:
        """Forget everything: what is cached becomes free."""
        self._pages.clear()
        self._digests.clear()
        self._pool.evict(self._pool.cached_pages)

    def release(self, pages: Sequence[int]) -> None:
        """Give one reference back. The end of a prefix counts as older than its start: it goes first."""
        self._pool.release(reversed(pages), keep=self._digests)

    def check(self, references: Mapping[int, int]) -> None:
        """See PagePool.check; also every cached page must be known here, and no free one."""
        self._pool.check(references)
        inverse = {page: digest for digest, page in self._pages.items()}
        idle = [page for page in self._digests if page not in references]
        if inverse != self._digests or not all(map(self._pool.is_cached, idle)):
            raise IntegrityError("the prefix cache knows pages that nobody keeps for it: restart the worker")
        if len(idle) != self._pool.cached_pages:
            raise IntegrityError(
                f"{self._pool.cached_pages} pages are cached, {len(idle)} of them can be found:"
                " restart the worker"
            )

    def check_unknown(self, pages: Iterable[int]) -> None:
        """Raise IntegrityError if one of them can be matched: their content is not there yet."""
        known = [page for page in pages if page in self._digests]
        if known:
            raise IntegrityError(f"pages {known[:8]} are cached and being received: restart the worker")
