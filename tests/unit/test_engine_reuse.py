"""A decode worker keeps the pages that it has of a prompt: only the others are reserved for a peer."""

from typing import Any

import pytest

from relay.sampling import SamplingParams
from tests.engine_rig import PAGE_SIZE, Relay, Rig, continuation, relayed, unified, work
from workers.engine.messages import Drop, Flush, Prefill, Proven, Refused, Reserve, Reserved
from workers.engine.pages import IntegrityError
from workers.engine.policy import pages_for

SYSTEM = list(range(1, 10))  # two whole pages and a token
WHOLE = len(SYSTEM) // PAGE_SIZE


def run(relay: Relay, leg: Prefill) -> Reserved:
    """From reserve to the last token; what was reserved for it."""
    relay.reserve(leg)
    relay.prefill.submit(leg)
    relay.prefill.run()
    relay.finish(leg)
    relay.prefill.run()
    relay.decode.run()
    text = [*leg.work.emitted, *relay.decode.text(leg.work.key)]
    assert text == continuation(list(leg.work.prompt_ids), leg.work.params.max_tokens)
    reserved: Reserved = relay.decode.the(Reserved, leg.work.key)
    return reserved


def received() -> Relay:
    """A relay whose decode worker has met SYSTEM."""
    relay = Relay(Rig(), Rig())
    assert run(relay, relayed("first", SYSTEM)).first_page == 0
    return relay


def reserve(rig: Rig, key: str, prompt: list[int], **more: Any) -> Reserved:
    rig.submit(Reserve(work(key, prompt, **more)))
    rig.step()
    reserved: Reserved = rig.the(Reserved, key)
    return reserved


@pytest.mark.parametrize("prompt", [[*SYSTEM, 30, 31, 32, 33], [*SYSTEM[:8], 40], SYSTEM])
def test_what_is_here_is_neither_reserved_nor_written_again(prompt: list[int]) -> None:
    relay = received()
    first = relay.decode.the(Reserved, "first")
    before = relay.decode.kv.tensor[:, first.pages[:WHOLE]].clone()
    again = run(relay, relayed("again", prompt))
    assert (again.first_page, len(again.pages)) == (WHOLE, pages_for(len(prompt), PAGE_SIZE) - WHOLE)
    assert not set(again.pages) & set(first.pages[:WHOLE])
    assert relay.decode.kv.tensor[:, first.pages[:WHOLE]].equal(before)
    stats = relay.decode.engine.stats
    assert (stats.reserved_tokens, stats.spared_tokens) == (len(SYSTEM) + len(prompt), WHOLE * PAGE_SIZE)
    assert stats.cached_tokens == 0, "those are of prompts that were computed here"
    assert relay.decode.engine.headroom.held_pages == 0


def test_a_prompt_of_whole_pages_that_are_all_here_needs_none() -> None:
    relay = received()
    again = run(relay, relayed("again", SYSTEM[: WHOLE * PAGE_SIZE]))
    assert (again.first_page, again.pages) == (WHOLE, ())


def test_an_answer_is_found_too_by_the_next_turn_and_by_the_next_attempt() -> None:
    relay = received()
    answer = continuation(SYSTEM, 8)
    known = (len(SYSTEM) + len(answer) - 1) // PAGE_SIZE  # of its last token there is no KV
    assert run(relay, relayed("turn", SYSTEM + answer + [5, 6])).first_page == known
    emitted = tuple(continuation(SYSTEM, 5))
    again = relayed("attempt", SYSTEM, 20, emitted=emitted)
    assert run(relay, again).first_page == (len(SYSTEM) + len(emitted)) // PAGE_SIZE


def test_legs_at_once_hold_the_same_pages_once() -> None:
    relay = received()
    rig = relay.decode
    both = [reserve(rig, key, [*SYSTEM, token]) for key, token in (("one", 20), ("two", 21))]
    assert [each.first_page for each in both] == [WHOLE, WHOLE]
    assert not set(both[0].pages) & set(both[1].pages)
    assert rig.engine.headroom.held_pages == WHOLE + len(both[0].pages) + len(both[1].pages)
    rig.submit(Drop("one"))
    rig.step()
    assert rig.engine.headroom.held_pages == WHOLE + len(both[1].pages), "the other still needs them"
    rig.submit(Drop("two"))
    rig.run()
    assert rig.engine.headroom.held_pages == 0


def test_only_pages_that_a_peer_may_write_are_quarantined() -> None:
    rig = received().decode
    cached = rig.engine.headroom.cached_pages
    new = reserve(rig, "a", [*SYSTEM, 20, 21, 22, 23]).pages
    rig.submit(Drop("a", quarantine=7))
    rig.step()
    headroom = rig.engine.headroom
    assert (headroom.held_pages, headroom.quarantined_pages, headroom.cached_pages) == (0, len(new), cached)
    assert reserve(rig, "b", SYSTEM).first_page == WHOLE, "the others serve on"
    rig.submit(Drop("b", quarantine=8), Proven(7), Proven(8))
    rig.run()
    assert rig.engine.headroom.quarantined_pages == 0


def test_a_room_without_pages_may_end_before_its_seal() -> None:
    rig = received().decode
    assert reserve(rig, "a", SYSTEM[: WHOLE * PAGE_SIZE]).pages == ()
    rig.submit(Drop("a", quarantine=7))
    rig.step()
    assert (rig.engine.headroom.held_pages, rig.engine.headroom.quarantined_pages) == (0, 0)
    rig.submit(Proven(7))
    rig.run()


def test_what_is_being_received_is_nobody_elses() -> None:
    """It is not there yet; two that meet hold pages of their own until one is sealed."""
    rig = Rig()
    first, second = reserve(rig, "a", SYSTEM), reserve(rig, "b", SYSTEM)
    assert (first.first_page, second.first_page) == (0, 0)
    assert not set(first.pages) & set(second.pages)
    cache = rig.engine._scheduler._kv._prefixes
    cache.insert(cache.chain((), SYSTEM), first.pages[:WHOLE])
    with pytest.raises(IntegrityError, match="being received"):
        rig.engine.check()


def test_held_pages_are_not_evicted_for_the_rest() -> None:
    relay = Relay(Rig(), Rig(pages=6, reserve_tokens=0))
    run(relay, relayed("first", SYSTEM, 1))
    assert relay.decode.engine.headroom.cached_pages == WHOLE
    reserved = reserve(relay.decode, "a", [*SYSTEM, *range(20, 35)])  # six pages: the whole pool
    assert (reserved.first_page, len(reserved.pages)) == (WHOLE, 4)
    assert not set(reserved.pages) & set(relay.decode.the(Reserved, "first").pages[:WHOLE])


def test_a_refusal_holds_nothing() -> None:
    relay = Relay(Rig(), Rig(pages=6, reserve_tokens=0))
    run(relay, relayed("first", SYSTEM, 1))
    rig = relay.decode
    reserve(rig, "other", [40] * 3 * PAGE_SIZE)
    rig.submit(Reserve(work("a", [*SYSTEM, *range(20, 30)])))
    rig.step()
    assert rig.the(Refused, "a")
    assert (rig.engine.headroom.held_pages, rig.engine.headroom.cached_pages) == (3, WHOLE)


@pytest.mark.parametrize(("salts", "found"), [(("x", "x"), WHOLE), (("x", "y"), 0), (("x", None), 0)])
def test_pages_are_found_by_their_owner_only(salts: tuple[str, str | None], found: int) -> None:
    relay = Relay(Rig(), Rig())
    first, second = (
        SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, cache_salt=salt) for salt in salts
    )
    run(relay, relayed("first", SYSTEM, params=first))
    assert run(relay, relayed("second", [*SYSTEM, 20], params=second)).first_page == found


def test_a_flush_while_the_rest_is_received_takes_nothing_away() -> None:
    relay = received()
    leg = relayed("a", [*SYSTEM, 20, 21])
    relay.reserve(leg)
    assert relay.decode.the(Reserved, "a").first_page == WHOLE
    relay.decode.submit(Flush(), unified("other", [30] * 100, 40))
    relay.decode.run()
    relay.prefill.submit(leg)
    relay.prefill.run()
    relay.finish(leg)
    relay.decode.run()
    assert relay.decode.text("a") == continuation([*SYSTEM, 20, 21], 8)


def test_a_scored_prompt_is_computed_whole_and_sent_in_part() -> None:
    relay = received()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    assert run(relay, relayed("a", SYSTEM, params=params)).first_page == WHOLE
    assert relay.prefill.admitted("a").cached_tokens == 0
