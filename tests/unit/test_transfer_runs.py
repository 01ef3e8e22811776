"""Page lists to index arrays."""

import numpy as np

from workers.transfer.runs import blocks, by_target, descriptors


def test_pairs_survive_the_sort() -> None:
    rng = np.random.default_rng(1)
    source, target = rng.permutation(100)[:40].tolist(), rng.permutation(200)[:40].tolist()
    local, remote = by_target(source, target)
    assert remote.tolist() == sorted(target)
    assert dict(zip(local.tolist(), remote.tolist(), strict=True)) == dict(zip(source, target, strict=True))


def test_blocks_are_layer_after_layer() -> None:
    assert blocks(np.array([3, 5], np.int32), 1, 3, pool_pages=10).tolist() == [13, 15, 23, 25]


def test_descriptors_count_what_does_not_merge() -> None:
    def count(source: list[int], target: list[int]) -> int:
        return descriptors(*by_target(source, target))

    assert count([], []) == 0
    assert count([4, 5, 6], [9, 10, 11]) == 1
    assert count([6, 5, 4], [11, 10, 9]) == 1
    assert count([4, 5, 6], [9, 10, 12]) == 2
    assert count([4, 6, 5], [9, 10, 11]) == 3
