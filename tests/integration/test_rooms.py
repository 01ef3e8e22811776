"""Every cell of the tables in docs/architecture.md, on Redis and on Valkey, each call made twice."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from relay.answers import Claim, EmitOutcome, Moved
from relay.mailbox import Ended, Mail, Published, Ready
from relay.request import Finish, Hold, Leg, Ring, State, Why
from relay.rooms import Rooms
from tests.integration.scene import LOAD, LONG_MS, PREFILLED, TRANSFER, Scene, card, check_integrity, claim
from tests.servers import RedisServer

PLACES = (
    "queued",
    "open",  # prefill claimed, decode leg queued
    "reserved",  # both claimed, room open
    "published",
    "ready",
    "decode",
    "unified",
    "finished",
    "failed",
    "cancelled",
)


class Cell(NamedTuple):
    """What one event does. Mail is `boot:what`; `room` is the state of the room there was before."""

    state: str
    room: str | None = None
    queue: str | None = None
    leases: str = ""
    mail: str = ""
    ring: str = ""
    attempt: int = 1


# An event that is missing in a row is stale there: it changes nothing, writes no mail and rings nothing.
REQUEUED = Cell("queued", queue="prefill", ring="prefill")
RETURNED = REQUEUED._replace(room="ended")  # from an unsealed room
EXPIRED = REQUEUED._replace(attempt=2)
TABLE: dict[str, dict[str, Cell]] = {
    "claim prefill": {"queued": Cell("prefill", queue="decode", leases="prefill", ring="decode")},
    "claim both": {"queued": Cell("decode", leases="decode")},
    "claim decode": {"open": Cell("prefill", "open", leases="decode prefill")},
    "publish": {"reserved": Cell("prefill", "published", leases="decode prefill", mail="P:published")},
    "kv_ready": {"published": Cell("ready", "sealed", leases="decode", mail="D:ready")},
    "emit": {
        "ready": Cell("decode", "sealed", leases="decode"),
        "decode": Cell("decode", "sealed", leases="decode"),
        "unified": Cell("decode", leases="decode"),
    },
    "finish": dict.fromkeys(("ready", "decode", "unified"), Cell("finished")),
    "release prefill": {
        "open": RETURNED,
        "reserved": RETURNED._replace(mail="D:requeued"),
        "published": RETURNED._replace(mail="D:requeued"),
    },
    "release decode": {
        "reserved": Cell("prefill", "open", queue="decode", leases="prefill", ring="decode"),
        "published": RETURNED._replace(mail="P:requeued"),
        **dict.fromkeys(("ready", "decode", "unified"), REQUEUED),
    },
    "fail prefill": {
        "open": Cell("failed", "ended"),
        "reserved": Cell("failed", "ended", mail="D:failed"),
        "published": Cell("failed", "ended", mail="D:failed"),
    },
    "fail decode": {
        "reserved": Cell("failed", "ended", mail="P:failed"),
        "published": Cell("failed", "ended", mail="P:failed"),
        **dict.fromkeys(("ready", "decode", "unified"), Cell("failed")),
    },
    "cancel": {
        "queued": Cell("cancelled"),
        "open": Cell("cancelled", "ended", mail="P:cancelled"),
        "reserved": Cell("cancelled", "ended", mail="P:cancelled D:cancelled"),
        "published": Cell("cancelled", "ended", mail="P:cancelled D:cancelled"),
        "ready": Cell("cancelled", mail="D:cancelled"),
        "decode": Cell("cancelled", mail="D:cancelled"),
        "unified": Cell("cancelled", mail="U:cancelled"),
    },
    "deadline": {
        "queued": Cell("failed"),
        "open": Cell("failed", "ended", mail="P:failed"),
        "reserved": Cell("failed", "ended", mail="P:failed D:failed"),
        "published": Cell("failed", "ended", mail="P:failed D:failed"),
        "ready": Cell("failed", mail="D:failed"),
        "decode": Cell("failed", mail="D:failed"),
        "unified": Cell("failed", mail="U:failed"),
    },
    "expire prefill": {
        "open": EXPIRED._replace(room="ended", mail="P:expired"),
        "reserved": EXPIRED._replace(room="ended", mail="P:expired D:expired"),
        "published": EXPIRED._replace(room="ended", mail="P:expired D:expired"),
    },
    "expire decode": {
        "reserved": Cell(
            "prefill", "open", queue="decode", leases="prefill", ring="decode", mail="D:expired", attempt=2
        ),
        "published": EXPIRED._replace(room="ended", mail="P:expired D:expired"),
        "ready": EXPIRED._replace(mail="D:expired"),
        "decode": EXPIRED._replace(mail="D:expired"),
        "unified": EXPIRED._replace(mail="U:expired"),
    },
}
TABLE["retract"] = TABLE["release decode"]
TABLE["unlisted prefill"] = TABLE["release prefill"]
TABLE["unlisted decode"] = TABLE["release decode"]

# What the caller is told when nothing changes, where that is not "stale": the same call came before.
REPEATED = {
    ("publish", "published"): True,
    ("publish", "ready"): True,
    ("publish", "decode"): True,
    ("kv_ready", "ready"): True,
    ("kv_ready", "decode"): True,
    ("finish", "finished"): EmitOutcome.DONE,
}


def _moved(answer: Moved) -> tuple[Any, list[Ring]]:
    return answer.ok, answer.rings


def _claim(s: Scene, leg: Leg, boot: str) -> tuple[Any, list[Ring]]:
    got = claim(s.rooms, leg, boot)
    if got is None:
        return False, []
    if leg is not Leg.DECODE:
        s.room = got.claimed.room
    return True, got.rings


def _emit(s: Scene, finish: Finish | None) -> tuple[Any, list[Ring]]:
    view = s.view()
    assert view
    outcome = s.emit(int(view.fields[b"tokens"]), 2, finish)
    return {EmitOutcome.OK: True, EmitOutcome.STALE: False}.get(outcome, outcome), []


def _renew(s: Scene, hold: Hold, lease_ms: int) -> None:
    """Give one of the two legs another lease, and leave the other as it is."""
    for boot in ("P", "D", "U"):
        kept = s.rooms.renew(boot, LOAD, [h for h in (s.p, s.d) if _owner(s, h) == boot], LONG_MS).kept
        if hold in [k.hold for k in kept]:
            s.rooms.renew(boot, LOAD, [hold], lease_ms)


def _owner(s: Scene, hold: Hold) -> str:
    if hold.leg is Leg.BOTH:
        return "U"
    return "P" if hold.leg is Leg.PREFILL else "D"


def _expire(s: Scene, hold: Hold) -> tuple[Any, list[Ring]]:
    _renew(s, hold, 0)
    reaped = s.rooms.reap(lease_ms=0, suspect_after=9)
    return bool(reaped.expired), reaped.rings


def _unlisted(s: Scene, hold: Hold) -> tuple[Any, list[Ring]]:
    rings = s.rooms.renew(_owner(s, hold), LOAD, [], LONG_MS).rings
    return bool(rings), rings


def _cancel(s: Scene) -> tuple[Any, list[Ring]]:
    before = s.rooms.record(s.id)
    after, rings = s.rooms.cancel(s.id)
    assert before
    assert after == s.rooms.record(s.id)
    return not before.state.terminal, rings


def _deadline(s: Scene) -> tuple[Any, list[Ring]]:
    s.let_deadlines_pass()
    reaped = s.rooms.reap(LONG_MS, 9)
    return bool(reaped.failed), reaped.rings


EVENTS: dict[str, Callable[[Scene], tuple[Any, list[Ring]]]] = {
    "claim prefill": lambda s: _claim(s, Leg.PREFILL, "P"),
    "claim both": lambda s: _claim(s, Leg.BOTH, "U"),
    "claim decode": lambda s: _claim(s, Leg.DECODE, "D"),
    "publish": lambda s: _moved(s.rooms.publish(s.d._replace(leg=Leg.DECODE), s.room, [7, 8], 3)),
    "kv_ready": lambda s: _moved(s.rooms.kv_ready(s.p, s.room, PREFILLED, TRANSFER)),
    "emit": lambda s: _emit(s, None),
    "finish": lambda s: _emit(s, Finish("stop", "</s>", "held")),
    "release prefill": lambda s: _moved(s.rooms.release(s.p, Why.PRESSURE)),
    "release decode": lambda s: _moved(s.rooms.release(s.d, Why.DRAIN)),
    "retract": lambda s: _moved(s.rooms.release(s.d, Why.RETRACT)),
    "fail prefill": lambda s: _moved(s.rooms.fail(s.p, "error", "Out of luck.")),
    "fail decode": lambda s: _moved(s.rooms.fail(s.d, "error", "Out of luck.")),
    "cancel": _cancel,
    "deadline": _deadline,
    "expire prefill": lambda s: _expire(s, s.p),
    "expire decode": lambda s: _expire(s, s.d),
    "unlisted prefill": lambda s: _unlisted(s, s.p),
    "unlisted decode": lambda s: _unlisted(s, s.d),
}


@pytest.fixture
def scene(rooms: Rooms, server: RedisServer, model: str) -> Scene:
    return Scene(rooms, server, model)


def _all_mail(s: Scene) -> set[str]:
    return {f"{boot}:{_word(mail)}" for boot in ("P", "D", "U") for mail in s.new_mail(boot)}


def _word(mail: Mail) -> str:
    return mail.why if isinstance(mail, Ended) else type(mail).__name__.lower()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("event", EVENTS)
def test_cell(scene: Scene, event: str, place: str) -> None:
    scene.reach(place)
    _all_mail(scene)
    before = scene.view()
    assert before
    check_integrity(scene.rooms)

    answer, rings = EVENTS[event](scene)

    after = scene.view()
    assert after
    cell = TABLE[event].get(place)
    if cell is None:
        assert answer == REPEATED.get((event, place), False)
        assert rings == []
        assert after == before
        assert _all_mail(scene) == set()
        return
    assert answer is (EmitOutcome.DONE if event == "finish" else True)
    seen = Cell(
        after.state,
        after.room if place != "queued" else None,
        after.queue,
        " ".join(sorted(after.leases)),
        cell.mail,
        " ".join(ring.leg for ring in rings),
        after.attempt,
    )
    assert seen == cell
    assert _all_mail(scene) == set(cell.mail.split())
    assert all(ring == Ring(ring.leg, scene.id, 3) for ring in rings)
    check_integrity(scene.rooms)

    if event == "emit":
        return  # the same tokens twice: test_emit_again
    EVENTS[event](scene)
    again = scene.view()
    assert again == after
    assert _all_mail(scene) == set()


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize(
    "event", [e for e in EVENTS if e.split()[0] in "publish kv_ready emit finish release fail"]
)
@pytest.mark.parametrize("wrong", ["fence", "nonce"])
def test_another_claim_is_stale(scene: Scene, event: str, place: str, wrong: str) -> None:
    """An older fence, and the same fence issued again to another claim after Redis lost its last second."""
    scene.reach(place)
    change = {"fence": lambda h: h._replace(fence=h.fence - 1), "nonce": lambda h: h._replace(nonce="other")}
    scene.p, scene.d = change[wrong](scene.p), change[wrong](scene.d)
    before = scene.view()
    answer, rings = EVENTS[event](scene)
    assert (answer, rings) == (False, [])
    assert scene.view() == before


@pytest.mark.parametrize(
    "event", [e for e in EVENTS if e.split()[0] in "publish kv_ready release fail expire"]
)
def test_a_request_nobody_knows_is_stale(scene: Scene, event: str) -> None:
    answer, rings = EVENTS[event](scene)
    assert (answer, rings) == (False, [])
    assert scene.emit(0, 1) is EmitOutcome.STALE
    assert scene.rooms.cancel(scene.id) == (None, [])
    assert scene.rooms.record(scene.id) is None
    assert scene.view() is None


def test_claims_are_known_by_their_nonce(scene: Scene) -> None:
    rooms = scene.rooms
    scene.reach("queued")
    p = [rooms.claim(Leg.PREFILL, "P", "n1", 77, 50, 50, LONG_MS) for _ in range(2)]
    assert isinstance(p[0], Claim)
    assert p[0] == p[1]
    assert p[0].rings == [Ring(Leg.DECODE, scene.id, 3)]
    d = [rooms.claim(Leg.DECODE, "D", "n2", 0, 50, 50, LONG_MS) for _ in range(2)]
    assert isinstance(d[0], Claim)
    assert d[0] == d[1]
    claimed = d[0].claimed
    assert (claimed.room, claimed.prefill_boot, claimed.prompt_ids, claimed.emitted) == (
        77,
        "P",
        (1, 2, 3),
        (),
    )
    assert claimed.hold.fence == p[0].claimed.hold.fence + 1
    scene.p, scene.d, scene.room = p[0].claimed.hold, claimed.hold, 77
    assert rooms.publish(scene.d, 77, [1], 0).ok
    assert rooms.kv_ready(scene.p, 77, PREFILLED, TRANSFER).ok
    for _ in range(2):  # in `ready`, then in `decode`
        repeated = rooms.claim(Leg.DECODE, "D", "n2", 0, 50, 50, LONG_MS)
        assert isinstance(repeated, Claim)
        assert repeated.claimed.hold == scene.d
        scene.emit(0, 1)


def test_a_repeated_unified_claim_is_the_same(scene: Scene) -> None:
    scene.reach("queued")
    first, second = (scene.rooms.claim(Leg.BOTH, "U", "n", 0, 50, 50, LONG_MS) for _ in range(2))
    assert isinstance(first, Claim)
    assert first == second
    assert (first.claimed.room, first.claimed.hold.leg, first.claimed.prefill_boot) == (0, Leg.BOTH, None)


def test_a_room_is_used_once(scene: Scene) -> None:
    """A claim that is repeated after its room has ended must not open that room again."""
    scene.reach("queued")
    first = scene.rooms.claim(Leg.PREFILL, "P", "n1", 77, 50, 50, LONG_MS)
    assert isinstance(first, Claim)
    assert scene.rooms.release(first.claimed.hold, Why.DRAIN).ok
    assert scene.rooms.claim(Leg.PREFILL, "P", "n1", 77, 50, 50, LONG_MS) is None
    assert scene.rooms.claim(Leg.PREFILL, "P", "n1", 78, 50, 50, LONG_MS)


def test_an_attempt_works_from_prompt_and_stream(scene: Scene) -> None:
    scene.reach("decode")
    scene.release(Leg.DECODE)
    got = claim(scene.rooms, Leg.PREFILL, "P2")
    assert got
    assert (got.claimed.prompt_ids, got.claimed.emitted) == ((1, 2, 3), (100, 101))
    assert got.claimed.attempt == 1


def test_mail_says_what_was_published(scene: Scene) -> None:
    scene.reach("published")
    (mail,) = scene.new_mail("P")
    assert mail == Published(scene.id, scene.room, "D", scene.d.nonce, (7, 8), 3, 0)
    published = scene.rooms.published(scene.room)
    assert published == ("D", scene.d.nonce, (7, 8), 3, 0)
    assert scene.rooms.kv_ready(scene.p, scene.room, PREFILLED, TRANSFER).ok
    assert scene.new_mail("D") == [Ready(scene.id, scene.room)]
    assert scene.rooms.published(scene.room) is None
    scene.rooms.cancel(scene.id)
    assert scene.new_mail("D") == [Ended(scene.id, scene.room, Leg.DECODE, "cancelled", scene.d.nonce)]


@pytest.mark.parametrize(("pages", "first_page"), [((8,), 1), ((), 2)])
def test_mail_says_which_pages_are_there_already(
    scene: Scene, pages: tuple[int, ...], first_page: int
) -> None:
    scene.reach("reserved")
    for _ in range(2):
        assert scene.rooms.publish(scene.d, scene.room, pages, 3, first_page).ok
    (mail,) = scene.new_mail("P")
    assert mail == Published(scene.id, scene.room, "D", scene.d.nonce, pages, 3, first_page)
    assert scene.rooms.published(scene.room) == ("D", scene.d.nonce, pages, 3, first_page)


def test_another_room_is_stale(scene: Scene) -> None:
    """Pages and KV of one attempt are never taken for those of another."""
    scene.reach("reserved")
    assert not scene.rooms.publish(scene.d, scene.room + 1, [7, 8], 3).ok
    assert scene.rooms.publish(scene.d, scene.room, [7, 8], 3).ok
    assert not scene.rooms.kv_ready(scene.p, scene.room + 1, PREFILLED, TRANSFER).ok


def test_kv_ready_before_publish_is_stale(scene: Scene) -> None:
    scene.reach("reserved")
    assert not scene.rooms.kv_ready(scene.p, scene.room, PREFILLED, TRANSFER).ok


def test_two_deaths_make_a_solo_run_and_its_crash_condemns(scene: Scene) -> None:
    for attempt, solo in ((1, False), (2, False), (3, True)):
        if attempt == 1:
            scene.reach("unified")
        else:
            scene.claim_unified()
        got = scene.rooms.claim(Leg.BOTH, "U", scene.d.nonce, 0, 50, 50, LONG_MS)  # the same again
        assert isinstance(got, Claim)
        assert (got.claimed.attempt, got.claimed.solo) == (attempt, solo)
        scene.rooms.renew("U", LOAD, [scene.d], 0)
        reaped = scene.rooms.reap(lease_ms=0, suspect_after=3)
        assert (reaped.expired, reaped.failed) == (([], [scene.id]) if solo else ([scene.id], []))
    record = scene.rooms.record(scene.id)
    assert record
    assert (record.state, record.error_code, record.attempts) == (State.FAILED, "crashed", 3)
    check_integrity(scene.rooms)


def test_handing_back_counts_as_no_attempt(scene: Scene) -> None:
    scene.reach("published")
    scene.release(Leg.DECODE, Why.PEER)
    record = scene.rooms.record(scene.id)
    assert record
    assert (record.attempts, record.retractions) == (1, 0)


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_what_is_wrong_in_itself_is_not_tried_for_ever(scene: Scene, leg: Leg) -> None:
    scene.reach("published")
    for _ in range(2):
        assert scene.release(leg, Why.ERROR)
        scene.claim_prefill()
        scene.claim_decode()
        assert scene.rooms.publish(scene.d, scene.room, [7], 3).ok
        scene.new_mail("P"), scene.new_mail("D")
    answer = scene.rooms.release(scene.p if leg is Leg.PREFILL else scene.d, Why.ERROR)
    assert answer == Moved(True, [])
    record = scene.rooms.record(scene.id)
    assert record
    assert (record.state, record.error_code, record.attempts) == (State.FAILED, "corrupted", 1)
    (told,) = scene.new_mail("D" if leg is Leg.PREFILL else "P")
    assert isinstance(told, Ended)
    assert told.why == "failed"
    check_integrity(scene.rooms)


def test_retractions_are_counted_once_the_kv_is_there(scene: Scene) -> None:
    scene.reach("reserved")
    scene.release(Leg.DECODE, Why.RETRACT)
    scene.claim_decode()
    assert scene.rooms.publish(scene.d, scene.room, [7], 3).ok
    assert scene.rooms.kv_ready(scene.p, scene.room, PREFILLED, TRANSFER).ok
    scene.release(Leg.DECODE, Why.RETRACT)
    record = scene.rooms.record(scene.id)
    assert record
    assert (record.attempts, record.retractions) == (1, 1)


def test_no_tokens_are_no_first_token(scene: Scene) -> None:
    scene.reach("ready")
    before = scene.view()
    assert scene.emit(0, 0) is EmitOutcome.OK
    assert scene.view() == before


def test_a_unified_worker_reports_its_prefill_with_tokens(scene: Scene) -> None:
    scene.reach("unified")
    scene.rooms.emit([scene.emission(0, 1)._replace(prefilled=PREFILLED)])
    record = scene.rooms.record(scene.id)
    assert record
    assert record.cached_tokens == PREFILLED.stamps.cached_tokens
    assert record.timings.prefill_end - record.timings.prefill_start == pytest.approx(15, abs=0.01)


@pytest.mark.parametrize("lost", [True, False])
def test_what_a_prefill_worker_told_with_its_renewal_is_there_when_it_dies(scene: Scene, lost: bool) -> None:
    scene.reach("reserved")
    progress = {scene.p.nonce: PREFILLED.stamps}
    for _ in range(2):  # as a repeated call
        scene.rooms.renew("P", LOAD, [scene.p], LONG_MS, progress)
    running = scene.rooms.timeline(scene.id)
    assert running
    assert [(s.name, s.end_ms is None) for s in running.spans() if s.name in ("prefill", "chunk")] == [
        ("prefill", True),
        ("chunk", False),
    ]
    scene.rooms.deregister("D")  # prefill goes on
    scene.rooms.deregister("P") if lost else scene.rooms.cancel(scene.id)
    over = scene.rooms.timeline(scene.id)
    assert over
    assert [(s.name, s.end_ms is None) for s in over.spans() if s.name in ("prefill", "chunk")] == [
        ("prefill", False),
        ("chunk", False),
    ]
    assert over.progress is None


def test_the_record_of_a_whole_run(scene: Scene) -> None:
    scene.reach("finished")
    record = scene.rooms.record(scene.id)
    assert record
    assert (record.state, record.finish_reason, record.stop_reason) == (State.FINISHED, "stop", 102)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (3, 3, 2)
    t = record.timings
    order = [t.submitted, t.claimed, t.decode_claimed, t.published, t.ready, t.first_token, t.ended]
    assert order == sorted(order)
    assert t.submitted > 0
    assert t.prefill_end - t.prefill_start == pytest.approx(15, abs=0.01)
    assert (t.transfer_us, t.transfer_bytes, t.transfer_descriptors, t.spared_bytes) == TRANSFER


def test_a_next_attempt_has_its_own_times(scene: Scene) -> None:
    scene.reach("decode")
    scene.release(Leg.DECODE)
    record = scene.rooms.record(scene.id)
    assert record
    t = record.timings
    assert (t.claimed, t.published, t.ready, t.decode_claimed, t.transfer_us, t.spared_bytes) == (0,) * 6
    assert t.first_token > 0, "a client has seen it"


def test_deregister_gives_everything_back(scene: Scene) -> None:
    scene.reach("decode")
    assert scene.rooms.deregister("D") == [Ring(Leg.PREFILL, scene.id, 3)]
    assert scene.rooms.deregister("D") == []
    check_integrity(scene.rooms)
    assert scene.new_mail("D") == []


def test_renew_tells_who_lives(rooms: Rooms) -> None:
    rooms.register(card("P"))
    rooms.register(card("D", "decode"))
    assert set(rooms.renew("P", LOAD, [], LONG_MS).workers) == {"P", "D"}
    rooms.deregister("D")
    assert rooms.renew("P", LOAD, [], LONG_MS).workers == ["P"]


def test_renew_tells_what_a_lost_mail_would_have_said(scene: Scene) -> None:
    scene.reach("reserved")
    for room_state in ("open", "published"):
        for boot, hold in (("P", scene.p), ("D", scene.d)):
            (kept,) = scene.rooms.renew(boot, LOAD, [hold], LONG_MS).kept
            assert (kept.hold, kept.state, kept.room_state) == (hold, "prefill", room_state)
        assert scene.rooms.publish(scene.d, scene.room, [7], 3).ok
    assert scene.rooms.kv_ready(scene.p, scene.room, PREFILLED, TRANSFER).ok
    (kept,) = scene.rooms.renew("D", LOAD, [scene.d], LONG_MS).kept
    assert (kept.state, kept.room_state) == ("ready", "sealed")


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ("cancel", "cancelled"),
        ("finish", "finished"),
        ("fail decode", "failed"),
        ("release decode", "requeued"),
        ("expire decode", "expired"),
    ],
)
def test_renew_tells_what_was_lost_and_why(scene: Scene, event: str, why: str) -> None:
    scene.reach("ready")
    EVENTS[event](scene)
    renewed = scene.rooms.renew("D", LOAD, [scene.d, scene.d._replace(request_id="req_never")], LONG_MS)
    assert [(lost.hold.request_id, lost.why) for lost in renewed.lost] == [
        (scene.id, why),
        ("req_never", "unknown"),
    ]
    assert renewed.kept == []


def test_a_prefill_leg_is_done_once_the_kv_is_ready(scene: Scene) -> None:
    scene.reach("ready")
    assert scene.rooms.renew("P", LOAD, [scene.p], LONG_MS).lost[0].why == "done"
    view = scene.view()
    assert view
    assert view.state == "ready"


def test_the_writer_settles_an_ended_room(scene: Scene) -> None:
    scene.reach("published")
    scene.rooms.cancel(scene.id)
    scene.new_mail("P"), scene.new_mail("D")
    for _ in range(2):
        scene.rooms.ask("P", scene.room, "D")
        assert [_word(mail) for mail in scene.new_mail("P")] == ["ask"]
        scene.rooms.settle(scene.room, "D")
        assert [_word(mail) for mail in scene.new_mail("D")] == ["settled"]
        view = scene.view()
        assert view
        assert view.room is None


def test_settling_does_not_end_a_room_in_use(scene: Scene) -> None:
    scene.reach("published")
    scene.rooms.settle(scene.room, "D")
    view = scene.view()
    assert view
    assert view.room == "published"
