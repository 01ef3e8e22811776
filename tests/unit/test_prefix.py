import random
from collections import Counter

import pytest

from workers.engine.pages import IntegrityError, PagePool
from workers.engine.prefix import PrefixCache


def make(pages: int = 8, page_size: int = 4, salt: bytes = b"model") -> tuple[PagePool, PrefixCache]:
    pool = PagePool(pages)
    return pool, PrefixCache(pool, page_size, salt)


def acquire(cache: PrefixCache, matched: list[int], count: int) -> list[int]:
    pages = cache.acquire(matched, count)
    assert pages is not None
    return pages


def test_only_whole_pages_have_a_digest() -> None:
    _, cache = make()
    assert len(cache.chain((), range(3))) == 0
    assert len(cache.chain((), range(4))) == 1
    assert len(cache.chain((), range(11))) == 2


def test_a_chain_can_be_continued() -> None:
    _, cache = make()
    whole = cache.chain((), range(12))
    start = cache.chain((), range(8))
    assert [*start, *cache.chain(start, range(8, 12))] == whole


def test_a_digest_depends_on_all_tokens_before_and_on_the_salt() -> None:
    _, cache = make()
    _, other = make(salt=b"another model")
    one, two = cache.chain((), [1, 2, 3, 4, 5, 6, 7, 8]), cache.chain((), [9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != two[1]
    assert cache.chain((), range(4)) != other.chain((), range(4))


def test_what_is_inserted_is_matched_as_far_as_it_is_equal() -> None:
    pool, cache = make()
    digests = cache.chain((), range(12))
    pages = acquire(cache, [], 3)
    cache.insert(digests, pages)
    cache.release(pages)
    assert pool.cached_pages == 3
    assert cache.match(digests) == pages
    assert cache.match(cache.chain((), [*range(8), 0, 0, 0, 0])) == pages[:2]
    assert cache.match(cache.chain((), [1, *range(1, 12)])) == []


def test_a_cached_page_that_nobody_finds_is_a_leak() -> None:
    _, cache = make()
    digests = cache.chain((), range(8))
    pages = acquire(cache, [], 2)
    cache.insert(digests, pages)
    cache.check(Counter(pages))
    cache.release(pages)
    cache.check({})
    cache.forget(pages[:1])
    with pytest.raises(IntegrityError, match="2 pages are cached, 1 of them can be found"):
        cache.check({})


def test_a_free_page_that_is_found_is_one_too_many() -> None:
    pool, cache = make()
    pages = acquire(cache, [], 2)
    cache.insert(cache.chain((), range(8)), pages)
    cache.release(pages)
    pool.evict(1)
    with pytest.raises(IntegrityError, match="nobody keeps"):
        cache.check({})


def test_a_page_of_the_same_content_is_not_kept_twice() -> None:
    pool, cache = make()
    digests = cache.chain((), range(8))
    first, second = acquire(cache, [], 2), acquire(cache, [], 2)
    cache.insert(digests, first)
    cache.insert(digests, second)
    assert cache.match(digests) == first
    cache.release(second)
    cache.release(first)
    assert (pool.cached_pages, pool.free_pages) == (2, 6)


def test_eviction_takes_the_least_recently_used_and_the_end_of_a_prefix_first() -> None:
    _, cache = make(pages=4)
    old, new = cache.chain((), range(8)), cache.chain((), range(100, 108))
    for digests in (old, new):
        pages = acquire(cache, [], 2)
        cache.insert(digests, pages)
        cache.release(pages)
    acquire(cache, [], 1)
    assert (len(cache.match(old)), len(cache.match(new))) == (1, 2)
    pages = acquire(cache, cache.match(old), 0)  # used again: now younger than `new`
    cache.release(pages)
    acquire(cache, [], 2)
    assert (len(cache.match(old)), len(cache.match(new))) == (1, 0)


def test_held_and_matched_pages_are_never_evicted() -> None:
    pool, cache = make(pages=4)
    digests = cache.chain((), range(8))
    pages = acquire(cache, [], 2)
    cache.insert(digests, pages)
    assert cache.acquire([], 3) is None
    cache.release(pages)
    matched = cache.match(digests)
    assert cache.acquire(matched, 3) is None  # the matched ones are no room for new ones
    assert pool.cached_pages == 2
    assert acquire(cache, matched, 2)[:2] == pages


def test_spare_pages_are_left() -> None:
    _, cache = make(pages=4)
    assert cache.acquire([], 3, spare=2) is None
    assert len(acquire(cache, [], 2)) == 2


def test_forgotten_pages_are_free_when_released() -> None:
    pool, cache = make()
    digests = cache.chain((), range(8))
    pages = acquire(cache, [], 2)
    cache.insert(digests, pages)
    cache.forget(pages)
    assert cache.match(digests) == []
    cache.release(pages)
    assert pool.free_pages == 8


@pytest.mark.parametrize("seed", range(5))
def test_matched_pages_always_hold_what_their_tokens_say(seed: int) -> None:
    """Pages carry the prefix last written to them; a match must find exactly its own prefix."""
    draw = random.Random(seed)
    _, cache = make(pages=12, page_size=2)
    content: dict[int, tuple[int, ...]] = {}
    holders: list[list[int]] = []
    hits = 0
    for _ in range(1500):
        if holders and draw.random() < 0.5:
            cache.release(holders.pop(draw.randrange(len(holders))))
        else:
            tokens = [draw.randrange(2) for _ in range(draw.randint(1, 10))]
            digests = cache.chain((), tokens)
            matched = cache.match(digests)
            hits += len(matched)
            for i, page in enumerate(matched):
                assert content[page] == tuple(tokens[: 2 * i + 2])
            pages = cache.acquire(matched, -(-len(tokens) // 2) - len(matched))
            if pages is not None:
                for i in range(len(matched), len(pages)):
                    content[pages[i]] = tuple(tokens[: 2 * i + 2])
                computed = draw.randint(len(matched), len(digests))
                cache.insert(digests[:computed], pages[:computed])
                holders.append(pages)
        cache.check(Counter(page for pages in holders for page in pages))
    assert hits > 100
