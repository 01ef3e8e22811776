"""From page lists to the index arrays of one write: sorted by where they land, so that neighbours merge."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int32]


def by_target(source: Sequence[int], target: Sequence[int]) -> tuple[IndexArray, IndexArray]:
    """Both page lists `[n]`, int32, reordered together so that the target's page ids ascend."""
    assert len(source) == len(target)
    remote = np.asarray(target, np.int32)
    order = np.argsort(remote, kind="stable")
    return np.asarray(source, np.int32)[order], remote[order]


def blocks(pages: IndexArray, first_layer: int, last_layer: int, pool_pages: int) -> IndexArray:
    """Block indices `layer * pool_pages + page` of `pages` in layers [first_layer, last_layer), layer after
    layer."""
    layers = np.arange(first_layer, last_layer, dtype=np.int32)
    return (layers[:, None] * np.int32(pool_pages) + pages[None, :]).reshape(-1)


def descriptors(local: IndexArray, remote: IndexArray) -> int:
    """How many pieces are left once blocks that follow each other on both sides are merged."""
    if len(local) == 0:
        return 0
    breaks = (np.diff(local) != 1) | (np.diff(remote) != 1)
    return 1 + int(np.count_nonzero(breaks))
