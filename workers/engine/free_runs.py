"""Free page numbers, kept as maximal runs so that a request's pages lie side by side."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise


class FreeRuns:
    """A set of page numbers that gives out contiguous ones: the transport moves a run as one block."""

    def __init__(self, total_pages: int) -> None:
        self.pages = total_pages
        self._starts = [0] if total_pages else []  # sorted
        self._lengths = {0: total_pages} if total_pages else {}  # start -> pages

    def __iter__(self) -> Iterator[int]:
        for start in self._starts:
            yield from range(start, start + self._lengths[start])

    def take(self, count: int) -> list[int]:
        """Remove `count` pages, ascending: the smallest run that holds them all, else the fewest runs."""
        assert 0 <= count <= self.pages, f"{count} pages wanted, {self.pages} free"
        taken: list[int] = []
        while len(taken) < count:
            missing = count - len(taken)
            fitting = [start for start in self._starts if self._lengths[start] >= missing]
            if fitting:
                taken += self._cut(min(fitting, key=self._lengths.__getitem__), missing)
            else:
                longest = max(self._starts, key=self._lengths.__getitem__)
                taken += self._cut(longest, self._lengths[longest])
        return sorted(taken)

    def put(self, pages: Iterable[int]) -> None:
        """Add pages that are not in the set."""
        for page in pages:
            self._put(page)

    @property
    def sound(self) -> bool:
        """Runs are sorted, apart and add up."""
        whole = self._lengths.keys() == set(self._starts) and sum(self._lengths.values()) == self.pages
        return whole and all(start + self._lengths[start] < after for start, after in pairwise(self._starts))

    def _cut(self, start: int, count: int) -> range:
        length = self._lengths.pop(start)
        index = bisect_left(self._starts, start)
        if count < length:
            self._starts[index] = start + count
            self._lengths[start + count] = length - count
        else:
            del self._starts[index]
        self.pages -= count
        return range(start, start + count)

    def _put(self, page: int) -> None:
        index = bisect_left(self._starts, page)
        before = self._starts[index - 1] if index else None
        assert index == len(self._starts) or self._starts[index] != page, f"page {page} is free already"
        assert before is None or before + self._lengths[before] <= page, f"page {page} is free already"
        length = 1
        if index < len(self._starts) and self._starts[index] == page + 1:
            length += self._lengths.pop(self._starts.pop(index))
        if before is not None and before + self._lengths[before] == page:
            self._lengths[before] += length
        else:
            self._starts.insert(index, page)
            self._lengths[page] = length
        self.pages += 1
