import random
from collections import Counter

import pytest

from workers.engine.free_runs import FreeRuns
from workers.engine.pages import IntegrityError, PagePool


def test_pages_come_as_the_smallest_run_that_fits() -> None:
    runs = FreeRuns(20)
    assert runs.take(20) == list(range(20))
    runs.put([2, 3, 4, 5, 6, 10, 11, 12, 16])
    assert runs.take(3) == [10, 11, 12]
    assert runs.take(1) == [16]
    assert runs.take(3) == [2, 3, 4]


def test_without_a_run_that_fits_pages_come_from_the_longest_ones() -> None:
    runs = FreeRuns(20)
    runs.take(20)
    runs.put([1, 5, 6, 10, 11, 12])
    assert runs.take(5) == [5, 6, 10, 11, 12]
    assert list(runs) == [1]


def test_a_page_cannot_be_freed_twice() -> None:
    runs = FreeRuns(4)
    runs.take(2)
    for page in (2, 3):
        with pytest.raises(AssertionError, match="free already"):
            runs.put([page])


@pytest.mark.parametrize("seed", range(5))
def test_runs_agree_with_a_set(seed: int) -> None:
    draw = random.Random(seed)
    runs, free, taken = FreeRuns(40), set(range(40)), set()
    for _ in range(500):
        if draw.random() < 0.5:
            pages = runs.take(draw.randint(0, min(8, len(free))))
            assert pages == sorted(set(pages) & free)
            free -= set(pages)
            taken |= set(pages)
        else:
            pages = draw.sample(sorted(taken), draw.randint(0, min(8, len(taken))))
            runs.put(pages)
            free |= set(pages)
            taken -= set(pages)
        assert runs.sound
        assert list(runs) == sorted(free)
        assert runs.pages == len(free)


def test_a_page_walks_through_all_its_states() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.share(pages[:1])
    pool.release(pages, keep={pages[0], pages[1]})
    assert (pool.free_pages, pool.held_pages, pool.cached_pages) == (2, 1, 1)
    pool.release(pages[:1], keep={pages[0]})
    assert (pool.free_pages, pool.held_pages, pool.cached_pages) == (2, 0, 2)
    assert pool.evict(1) == [pages[1]]  # released first
    pool.share([pages[0]])
    pool.quarantine(7, pages[:1])
    assert (pool.free_pages, pool.held_pages, pool.cached_pages, pool.quarantined_pages) == (3, 0, 0, 1)
    pool.prove(8)
    assert pool.quarantined_pages == 1
    pool.prove(7)
    pool.prove(7)
    assert pool.free_pages == 4
    pool.check({})


def test_one_release_too_many_is_caught() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages, keep=())
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(pages, keep=())


def test_shared_pages_cannot_be_quarantined() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages)
    with pytest.raises(AssertionError, match="2 owners"):
        pool.quarantine(1, pages)


def test_check_finds_a_leak_and_a_second_owner() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.check({page: 1})
    with pytest.raises(IntegrityError, match="disagree"):
        pool.check({})
    with pytest.raises(IntegrityError, match="disagree"):
        pool.check({page: 2})
    pool._references[page] = 0  # lost without being freed
    with pytest.raises(IntegrityError, match="not total"):
        pool.check({})


@pytest.mark.parametrize("seed", range(5))
def test_the_pool_agrees_with_a_naive_model(seed: int) -> None:
    draw = random.Random(seed)
    pool = PagePool(24)
    owners: list[list[int]] = []
    rooms: dict[int, list[int]] = {}
    keep: set[int] = set()
    cached: list[int] = []
    for step in range(1000):
        match draw.randrange(6):
            case 0:
                count = draw.randint(0, min(5, pool.free_pages))
                owners.append(pool.allocate(count))
                keep |= set(draw.sample(owners[-1], draw.randint(0, count)))
            case 1 if owners:
                pages = list(draw.choice(owners))
                pool.share(pages)
                owners.append(pages)
            case 2 if cached:
                pages = draw.sample(cached, draw.randint(1, len(cached)))
                pool.share(pages)
                cached = [page for page in cached if page not in pages]
                owners.append(pages)
            case 3 if owners:
                pages = owners.pop(draw.randrange(len(owners)))
                pool.release(pages, keep)
                held = {page for owner in owners for page in owner}
                cached += [page for page in pages if page in keep and page not in held]
            case 4 if cached:
                count = draw.randint(1, len(cached))
                assert pool.evict(count) == cached[:count]
                keep -= set(cached[:count])
                cached = cached[count:]
            case 5:
                references = Counter(page for owner in owners for page in owner)
                sole = [o for o in owners if o and all(references[p] == 1 and p not in keep for p in o)]
                if sole:
                    owners.remove(sole[0])
                    rooms[step] = sole[0]
                    pool.quarantine(step, sole[0])
                elif rooms:
                    room = draw.choice(sorted(rooms))
                    del rooms[room]
                    pool.prove(room)
        pool.check(Counter(page for owner in owners for page in owner))
        assert pool.cached_pages == len(cached)
        assert pool.quarantined_pages == sum(map(len, rooms.values()))
