"""What becomes of a leg and its pages: admission, endings, drops, refusals, crashes."""

from collections.abc import Callable
from threading import Event
from time import monotonic
from typing import cast

import pytest
import torch

from relay.grammar import Grammars
from relay.sampling import SamplingParams
from tests.engine_rig import EOS, PAGE_SIZE, HashingModel, Rig, continuation, relayed, unified, work
from workers.engine.messages import (
    Admitted,
    Chunked,
    Crashed,
    Drop,
    Ending,
    Failed,
    Flush,
    Prebuilt,
    Prefill,
    Prefilled,
    Produced,
    Proven,
    Refused,
    Reserve,
    Reserved,
    Retracted,
    Sampled,
    Stop,
)
from workers.engine.scheduler import Scheduler


def params(**wanted: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "temperature": 0.0} | wanted)  # type: ignore[arg-type]


def reserve(key: str, tokens: int) -> Reserve:
    """For a prompt that begins like no other."""
    return Reserve(work(key, [ord(key[0]) - 70] * tokens))


def a_prompt_that_meets(token: int) -> tuple[list[int], int]:
    """A prompt whose continuation holds `token`, and where."""
    for start in range(1, 50):
        text = continuation([start, 2, 3], 25)
        if token in text[2:] and text.index(token) > 1:
            return [start, 2, 3], text.index(token)
    raise AssertionError("no such prompt")


def test_each_chunk_of_a_relayed_prompt_is_told_the_last_with_the_first_token() -> None:
    rig = Rig(chunk_tokens=16)
    rig.submit(relayed("a", [3] * 40))
    rig.run()
    told = [event.chunk for event in rig.events if isinstance(event, Chunked)]
    (prefilled,) = (event for event in rig.events if isinstance(event, Prefilled))
    assert [chunk.amount for chunk in prefilled.chunks] == [16, 16, 8]
    assert list(prefilled.chunks[:-1]) == told
    moments = [moment for chunk in prefilled.chunks for moment in chunk[:2]]
    assert moments == sorted(moments)


def test_eos_ends_a_leg_unless_it_is_ignored_or_too_early() -> None:
    prompt, at = a_prompt_that_meets(EOS)
    rig = Rig()
    rig.submit(unified("stops", prompt, params=params()))
    rig.submit(unified("ignores", prompt, params=params(ignore_eos=True)))
    rig.submit(unified("waits", prompt, params=params(min_tokens=at + 1)))
    rig.run()
    text = continuation(prompt, 30)
    assert rig.text("stops") == text[: at + 1]
    assert rig.text("ignores") == text
    assert rig.text("waits")[:at] == text[:at]
    assert EOS not in rig.text("waits")[: at + 1]
    last = {produced.key: produced for produced in rig.produced}
    assert (last["stops"].ending, last["stops"].stop_token) == (Ending.STOP, None)
    assert last["ignores"].ending == Ending.LENGTH


class SlowGrammars:
    """Compiled when the test says so."""

    def __init__(self) -> None:
        self.compiled = False
        self.waiting: list[Callable[[], object]] = []

    def ready(self, grammar: str, then: Callable[[], object]) -> bool:
        self.waiting.append(then)
        return self.compiled

    def matcher(self, grammar: str) -> None:
        assert self.compiled


@pytest.mark.parametrize("relay", [False, True])
def test_nobody_waits_for_the_grammar_of_another(relay: bool) -> None:
    rig, grammars = Rig(), SlowGrammars()
    rig.engine._sampler._grammars = cast(Grammars, grammars)
    bound = Prefill(work("bound", [1, 2, 3], params=params(grammar="g", max_tokens=5)), relay)
    rig.submit(bound, unified("free", [4, 5], 20))
    rig.run()
    assert rig.text("free") == continuation([4, 5], 20)
    assert not [event for event in rig.events if isinstance(event, Prefilled) and event.key == "bound"]
    grammars.compiled = True
    grammars.waiting[0]()
    rig.run()
    assert rig.the(Prefilled, "bound")


def test_what_cannot_meet_its_deadline_is_not_begun() -> None:
    rig = Rig(pages=256)
    rig.submit(relayed("over", [1, 2, 3], deadline=monotonic()))
    rig.run()
    assert (rig.the(Failed, "over").code, rig.model.batch_sizes) == ("timeout", [])
    rig.submit(relayed("unmeasured", list(range(16)), deadline=monotonic() + 60))
    rig.run()  # and now the pace is known
    steps = len(rig.model.batch_sizes)
    rig.submit(relayed("hopeless", [5] * 900, deadline=monotonic() + 1e-4))
    rig.run()
    assert (rig.the(Failed, "hopeless").code, len(rig.model.batch_sizes)) == ("timeout", steps)
    rig.submit(relayed("in time", [5] * 900, deadline=monotonic() + 600))
    rig.run()
    assert rig.the(Prefilled, "in time")


def test_a_stop_token_ends_a_leg_and_is_named() -> None:
    prompt, at = a_prompt_that_meets(7)
    rig = Rig()
    rig.submit(unified("a", prompt, params=params(stop_token_ids=(7,), ignore_eos=True)))
    rig.run()
    assert rig.text("a") == continuation(prompt, 30)[: at + 1]
    assert (rig.produced[-1].ending, rig.produced[-1].stop_token) == (Ending.STOP, 7)


def test_the_context_and_the_pool_end_a_leg_by_length() -> None:
    for rig in (Rig(context_tokens=12), Rig(pages=3)):
        rig.submit(unified("a", [1, 2, 3, 4, 5], tokens=100))
        rig.run()
        assert rig.text("a") == continuation([1, 2, 3, 4, 5], 7)
        assert rig.produced[-1].ending == Ending.LENGTH


def test_pages_are_released_before_the_ending_is_told() -> None:
    rig = Rig()
    held: list[int] = []
    rig.engine._on_produced = lambda produced: held.append(rig.engine.headroom.held_pages)
    rig.submit(unified("a", [1, 2, 3], tokens=2))
    rig.run()
    assert held == [1, 0]


def test_what_can_never_fit_fails_at_once() -> None:
    rig = Rig(pages=4, context_tokens=100)
    rig.submit(unified("a", [1] * 17), relayed("b", [1] * 17), reserve("c", 17))
    rig.run()
    for key in "abc":
        assert "17 tokens do not fit" in rig.the(Failed, key).reason
    assert rig.engine.headroom.admitted == 3


def test_legs_are_admitted_by_arrival_when_their_whole_prompt_fits() -> None:
    rig = Rig(pages=6, chunk_tokens=100)
    rig.submit(relayed("late", [1] * 8, arrival_ms=2.0), relayed("early", [2] * 20, arrival_ms=1.0))
    rig.run()
    rig.the(Prefilled, "early")
    assert not any(isinstance(event, Admitted) and event.key == "late" for event in rig.events)
    assert rig.engine.headroom.waiting == 1
    rig.submit(Drop("early"))
    rig.run()
    rig.the(Prefilled, "late")


def test_admission_waits_until_the_step_has_room_so_that_prefixes_are_found() -> None:
    rig, prompt = Rig(chunk_tokens=16), [3] * 33
    rig.submit(*(relayed(key, prompt) for key in "abc"))
    rig.run()
    assert [rig.admitted(key).cached_tokens for key in "abc"] == [0, 32, 32]


def test_a_flush_forgets_prefixes_and_leaves_running_legs_alone() -> None:
    rig, prompt = Rig(), [3] * 17
    rig.submit(unified("cached", [5] * 9, tokens=2))
    rig.run()
    rig.submit(unified("running", prompt, tokens=40))
    rig.step()
    assert rig.engine.headroom.cached_pages == 2
    rig.submit(Flush(), relayed("a", [5] * 9), relayed("b", prompt))
    rig.step()
    assert [rig.admitted(key).cached_tokens for key in "ab"] == [0, 0]
    rig.run()
    assert rig.text("running") == continuation(prompt, 40)


def test_headroom_leaves_the_reserve_of_running_legs_and_what_waits() -> None:
    rig = Rig(pages=20, reserve_tokens=8)
    rig.submit(unified("a", [1] * 6, tokens=50))
    rig.step()
    # 20 pages, 2 held; 7 + 8 tokens will need 4 pages, so 2 more are kept.
    assert rig.engine.headroom.free_tokens == 16 * PAGE_SIZE
    rig.submit(reserve("b", 5))
    rig.step()
    # A reservation takes 2 pages and will grow by 8 tokens; "a" has 8 tokens now.
    assert rig.engine.headroom.free_tokens == (16 - 2 - 2) * PAGE_SIZE
    assert rig.engine.headroom.running == 1


def test_a_reservation_that_would_take_the_reserve_is_refused() -> None:
    rig = Rig(pages=8, reserve_tokens=8)
    rig.submit(unified("a", [1] * 6, tokens=50))
    rig.step()
    rig.submit(reserve("b", 5 * PAGE_SIZE), reserve("c", 4 * PAGE_SIZE))
    rig.step()
    rig.the(Refused, "b")
    rig.the(Reserved, "c")


def test_a_leg_can_be_dropped_whatever_it_does() -> None:
    rig = Rig(pages=24, chunk_tokens=8)
    rig.submit(reserve("receiving", 6))
    rig.submit(unified("running", [1] * 6, tokens=50), relayed("prefilled", [2] * 6))
    for _ in range(3):
        rig.step()
    rig.submit(relayed("midway", [3] * 30), relayed("waiting", [4] * 20, arrival_ms=9.0))
    rig.step()
    rig.step()
    assert rig.engine.headroom.waiting == 1
    before = len(rig.produced)
    for key in ("unknown", "waiting", "midway", "prefilled", "running", "receiving"):
        for _ in range(2):  # a second time it is unknown
            rig.submit(Drop(key))
        rig.engine._obey_all()
        rig.engine.check()
    rig.run()
    assert len(rig.produced) == before
    headroom = rig.engine.headroom
    assert (headroom.running, headroom.waiting, headroom.held_pages) == (0, 0, 0)
    assert headroom.free_pages + headroom.cached_pages == 24


def test_a_token_of_a_dropped_leg_is_never_told() -> None:
    rig = Rig()
    rig.submit(reserve("a", 3))
    rig.step()
    rig.submit(Prebuilt("a", Sampled(5)), Drop("a"))
    rig.run()
    assert rig.produced == []


def test_prebuilt_after_drop_is_ignored() -> None:
    rig = Rig()
    rig.submit(reserve("a", 3), Drop("a"), Prebuilt("a", Sampled(5)))
    rig.run()
    assert rig.produced == []
    assert rig.engine.headroom.free_pages == 64


def test_pages_a_peer_may_write_are_quarantined_until_proof() -> None:
    rig = Rig(pages=8)
    rig.submit(reserve("a", 10), reserve("b", 4))
    rig.step()
    rig.submit(Drop("a", quarantine=11), Drop("b", quarantine=12), Drop("a", quarantine=11))
    rig.run()
    assert rig.engine.headroom.quarantined_pages == 4
    rig.submit(reserve("c", 20))
    rig.run()
    rig.the(Refused, "c")
    rig.submit(Proven(11), Proven(99), Proven(11))
    rig.run()
    assert (rig.engine.headroom.quarantined_pages, rig.engine.headroom.free_pages) == (1, 7)


def test_the_last_running_leg_waits_for_receiving_pages_instead_of_hanging() -> None:
    rig = Rig(pages=4, reserve_tokens=1)
    rig.submit(unified("a", [1, 2, 3], tokens=9))
    rig.step()
    rig.submit(reserve("b", 8))
    rig.run()
    assert len(rig.text("a")) == 6  # eight tokens of KV, and one more
    assert not any(isinstance(event, Retracted) for event in rig.events)
    rig.submit(Drop("b"))
    rig.run()
    assert rig.text("a") == continuation([1, 2, 3], 9)


def test_the_youngest_is_retracted_and_its_pages_stay_cached() -> None:
    rig = Rig(pages=6, reserve_tokens=1, chunk_tokens=100)
    rig.submit(unified("old", [1] * 7, tokens=16, arrival_ms=1.0))
    rig.submit(unified("young", [2] * 7, tokens=16, arrival_ms=2.0))
    rig.run()
    assert [event for event in rig.events if isinstance(event, Retracted)] == [Retracted("young")]
    assert rig.text("old") == continuation([1] * 7, 16)
    assert rig.text("young") == continuation([2] * 7, len(rig.text("young")))
    assert rig.engine.stats.retractions == 1
    assert rig.engine.headroom.held_pages == 0


class BrokenModel(HashingModel):
    """Computes NaN for a prompt that holds token 13."""

    def forward(self, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        logits = super().forward(tokens, *rest)  # type: ignore[arg-type]
        return logits * float("nan") if 13 in tokens.tolist() else logits


@pytest.mark.parametrize("leg", [unified, relayed])
def test_a_leg_without_a_choosable_token_fails_alone_and_is_not_cached(leg: object) -> None:
    rig = Rig(chunk_tokens=8)
    rig.engine._runner._model = BrokenModel()  # type: ignore[assignment]
    rig.submit(leg("bad", [13] * 9))  # type: ignore[operator]
    rig.run()
    assert "logit" in rig.the(Failed, "bad").reason
    assert rig.engine.headroom.held_pages == 3  # a send may read them until Drop
    rig.submit(Drop("bad"), unified("good", [1, 2, 3]))
    rig.run()
    assert rig.engine.headroom.cached_pages == 2  # of "good"
    assert rig.text("good") == continuation([1, 2, 3], 8)


def test_the_thread_computes_until_it_is_stopped() -> None:
    rig = Rig()
    ended = Event()

    def take(produced: list[Produced]) -> None:
        rig.produced.extend(produced)
        if produced[-1].ending:
            ended.set()

    rig.engine._on_produced = take
    rig.engine.start()
    rig.submit(unified("a", [1, 2, 3]))
    assert ended.wait(10.0)
    rig.submit(Stop())
    assert rig.engine.join(10.0)
    assert rig.text("a") == continuation([1, 2, 3], 8)
    assert rig.engine.heartbeat.deadline is None


@pytest.mark.parametrize(
    "leak",
    [
        lambda scheduler: scheduler._kv.pool.allocate(1),  # by nobody
        lambda scheduler: scheduler._kv._prefixes.insert([b"a page that is free"], [0]),
    ],
    ids=["pool", "cache"],
)
def test_a_leak_is_logged_when_the_engine_is_idle(
    monkeypatch: pytest.MonkeyPatch, leak: Callable[[Scheduler], object]
) -> None:
    logged = Event()
    monkeypatch.setattr("workers.engine.engine.QUIET_S", 0.01)
    monkeypatch.setattr("workers.engine.engine.log.event", lambda *_, **__: logged.set())
    rig = Rig()
    leak(rig.engine._scheduler)
    rig.engine.start()
    assert logged.wait(10.0)
    rig.submit(Stop())
    assert rig.engine.join(10.0)
    assert rig.events == [], "the engine goes on"


def test_stats_count_what_was_computed_and_what_was_found() -> None:
    rig = Rig()
    for key in "ab":
        rig.submit(unified(key, [1] * 10, tokens=5))
        rig.run()
    stats = rig.engine.stats
    assert (stats.prefill_tokens, stats.cached_tokens, stats.decode_tokens) == (10 + 2, 8, 2 * 4)
    assert stats.steps == 2 * 5
    assert 0 < stats.forward_s < stats.step_s


def test_a_crash_is_told_and_ends_the_thread() -> None:
    class Crashing(HashingModel):
        def forward(self, *rest: object) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError("out of luck")

    rig = Rig()
    rig.engine._runner._model = Crashing()  # type: ignore[assignment]
    rig.engine.start()
    rig.submit(unified("a", [1, 2, 3]))
    assert rig.engine.join(10.0)
    crashed = rig.events[-1]
    assert isinstance(crashed, Crashed)
    assert "out of luck" in str(crashed.error)
    assert rig.engine.heartbeat.deadline is not None  # the step is not over and never will be


def test_a_deadline_stands_while_a_step_runs() -> None:
    rig = Rig()
    seen = []

    class Watching(HashingModel):
        def forward(self, *rest: object) -> torch.Tensor:  # type: ignore[override]
            seen.append(rig.engine.heartbeat)
            return super().forward(*rest)  # type: ignore[arg-type]

    rig.engine._runner._model = Watching()  # type: ignore[assignment]
    rig.submit(unified("a", [1, 2, 3], tokens=2))
    rig.run()
    assert [beat.step for beat in seen] == [1, 2]
    assert all(beat.deadline is not None for beat in seen)
    assert rig.engine.heartbeat == (2, None)
