"""Who owns each page of the KV pool: every page is either free, held, cached or quarantined."""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain

from workers.engine.free_runs import FreeRuns


class IntegrityError(AssertionError):
    """The page accounts do not add up: pages leaked or have two owners. The worker must be restarted."""


class PagePool:
    """Page numbers and reference counts; what is in the pages is nobody's business here.

    Held pages have a reference count of at least one. Cached pages have none and wait, least recently used
    first, to be shared again or evicted. Quarantined pages belong to a room whose peer may still write them.
    """

    def __init__(self, total_pages: int) -> None:
        self.total_pages = total_pages
        self._references = [0] * total_pages
        self._free = FreeRuns(total_pages)
        self._held = 0
        self._cached: dict[int, None] = {}  # in order of release
        self._quarantine: dict[int, list[int]] = {}  # room -> pages

    @property
    def free_pages(self) -> int:
        return self._free.pages

    @property
    def held_pages(self) -> int:
        return self._held

    @property
    def cached_pages(self) -> int:
        return len(self._cached)

    @property
    def quarantined_pages(self) -> int:
        return sum(map(len, self._quarantine.values()))

    def is_cached(self, page: int) -> bool:
        return page in self._cached

    def allocate(self, count: int) -> list[int]:
        """Free → held, ascending, in as few runs as there are. At most `free_pages`."""
        pages = self._free.take(count)
        for page in pages:
            self._references[page] = 1
        self._held += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Held or cached → held, one reference more."""
        for page in pages:
            if not self._references[page]:
                del self._cached[page]
                self._held += 1
            self._references[page] += 1

    def release(self, pages: Iterable[int], keep: Container[int]) -> None:
        """One reference less; a page that nobody holds any more is cached if it is in `keep`, else free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released once too often"
            self._references[page] -= 1
            if self._references[page]:
                continue
            self._held -= 1
            if page in keep:
                self._cached[page] = None
            else:
                self._free.put((page,))

    def evict(self, count: int) -> list[int]:
        """Cached → free, the `count` least recently used ones."""
        assert count <= len(self._cached), f"{count} pages to evict, {len(self._cached)} cached"
        oldest = [page for page, _ in zip(self._cached, range(count))]
        for page in oldest:
            del self._cached[page]
        self._free.put(oldest)
        return oldest

    def quarantine(self, room: int, pages: Sequence[int]) -> None:
        """Held by one owner → quarantined under `room`."""
        for page in pages:
            assert self._references[page] == 1, f"page {page} has {self._references[page]} owners, not one"
            self._references[page] = 0
        self._held -= len(pages)
        self._quarantine.setdefault(room, []).extend(pages)

    def prove(self, room: int) -> None:
        """Quarantined → free: no write of `room` can come any more. A room without pages is ignored."""
        self._free.put(self._quarantine.pop(room, ()))

    def check(self, references: Mapping[int, int]) -> None:
        """Compare with what the owners say they hold (page → references). Raises IntegrityError."""
        held = [page for page, count in enumerate(self._references) if count]
        everywhere = sorted(chain(self._free, held, self._cached, *self._quarantine.values()))
        if everywhere != list(range(self.total_pages)) or len(held) != self._held:
            raise IntegrityError(
                f"free {self.free_pages} + held {self._held} ({len(held)} counted) "
                f"+ cached {self.cached_pages} + quarantined {self.quarantined_pages} "
                f"is not total {self.total_pages}: restart the worker"
            )
        wrong = [page for page, count in enumerate(self._references) if count != references.get(page, 0)]
        if wrong:
            raise IntegrityError(
                f"owners disagree with the reference counts of pages {wrong[:8]}: restart the worker"
            )
        if not self._free.sound:
            raise IntegrityError("the runs of free pages overlap or touch: restart the worker")
