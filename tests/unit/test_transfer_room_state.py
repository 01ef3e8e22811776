"""A send's state machine under every order of events."""

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from workers.engine.messages import Computed, Sampled
from workers.transfer.base import Destination, Seal, SendFailed, Sent, Settled, TransferEvent
from workers.transfer.room_state import PagePost, Post, RoomState, RowPost

LAYERS, PAGES, POOL, PEER_POOL = 3, 4, 10, 20
SOURCE = (7, 2, 3, 9)
DESTINATION = Destination("decode", (15, 16, 4, 5, 6), 1, 99)
SEAL = Seal(5, 1, 99, 0, 60, PAGES, Sampled(1), 0)
PARTS = (Computed("k", 0, LAYERS, 0, 1), Computed("k", 0, 2, 1, 4), Computed("k", 2, 3, 1, 4))


def fresh(post_blocks: int = 100) -> RoomState:
    return RoomState(5, SOURCE, LAYERS, POOL, post_blocks)


def told(state: RoomState) -> list[TransferEvent]:
    return list(iter(lambda: state.event(8), None))


def post_all(state: RoomState) -> list[Post]:
    posts = []
    while (post := state.due()) is not None:
        state.posted(post, 0.0)
        posts.append(post)
    return posts


def bootstrap(state: RoomState, destination: Destination = DESTINATION) -> None:
    state.bootstrap(destination, PEER_POOL, peer_rows=4)


def written(posts: list[Post]) -> dict[int, int]:
    pages = [post for post in posts if isinstance(post, PagePost)]
    return {
        int(to): int(source) for post in pages for source, to in zip(post.local, post.remote, strict=True)
    }


ALL_BLOCKS = {
    layer * PEER_POOL + to: layer * POOL + source
    for layer in range(LAYERS)
    for source, to in zip(SOURCE, DESTINATION.pages, strict=False)
}


@pytest.mark.parametrize("post_blocks", [1, 5, 100])
@pytest.mark.parametrize("order", list(itertools.permutations(["bootstrap", "seal", *PARTS])))
def test_every_order_sends_all_pages_then_the_row(
    order: tuple[str | Computed, ...], post_blocks: int
) -> None:
    state = fresh(post_blocks)
    posts: list[Post] = []
    for step in order:
        if step == "bootstrap":
            bootstrap(state)
        elif step == "seal":
            state.seal(SEAL, 1.0)
        else:
            assert isinstance(step, Computed)
            state.computed(step)
        posts += post_all(state)
    assert not any(isinstance(post, RowPost) for post in posts)  # nothing is DONE yet
    assert all(len(post.local) <= post_blocks for post in posts if isinstance(post, PagePost))
    assert written(posts) == ALL_BLOCKS
    for post in reversed(posts):
        assert state.due() is None
        state.done(post, 2.0)
    (row,) = post_all(state)
    assert row == RowPost(SEAL, DESTINATION.row)
    assert told(state) == []
    state.done(row, 3.5)
    (sent,) = told(state)
    assert isinstance(sent, Sent)
    assert (sent.bytes, sent.exposed_us) == (LAYERS * PAGES * 8, 2_500_000)
    state.close()
    assert told(state) == [Settled(5)]
    assert state.finished


@pytest.mark.parametrize("post_blocks", [1, 100])
@pytest.mark.parametrize("there", range(1, PAGES + 1))
@pytest.mark.parametrize("order", list(itertools.permutations(["bootstrap", "seal", *PARTS])))
def test_what_the_peer_has_is_left_out_at_its_place(
    order: tuple[str | Computed, ...], there: int, post_blocks: int
) -> None:
    state = fresh(post_blocks)
    posts: list[Post] = []
    for step in order:
        if step == "bootstrap":
            bootstrap(state, DESTINATION._replace(pages=DESTINATION.pages[there:PAGES], first_page=there))
        elif step == "seal":
            state.seal(SEAL, 1.0)
        else:
            assert isinstance(step, Computed)
            state.computed(step)
        if there < PAGES:
            posts += post_all(state)
    pages = [post for post in posts if isinstance(post, PagePost)]
    assert written(posts) == {
        layer * PEER_POOL + DESTINATION.pages[place]: layer * POOL + SOURCE[place]
        for layer in range(LAYERS)
        for place in range(there, PAGES)
    }
    assert sum(len(post.local) for post in pages) == LAYERS * (PAGES - there)
    assert len(pages) <= state.descriptors <= LAYERS * (PAGES - there)
    for post in posts:
        state.done(post, 2.0)
    (row,) = post_all(state)
    assert row == RowPost(SEAL, DESTINATION.row)
    assert not state.pending
    state.done(row, 3.5)
    (sent,) = told(state)
    assert isinstance(sent, Sent)
    assert (sent.bytes, sent.spared_bytes) == (LAYERS * (PAGES - there) * 8, LAYERS * there * 8)


def test_what_the_peer_has_need_not_be_done_on_the_device() -> None:
    state = fresh()
    bootstrap(state, DESTINATION._replace(pages=(6,), first_page=3))
    state.computed(Computed("k", 0, LAYERS, 0, 3, lambda: False))
    state.computed(Computed("k", 0, LAYERS, 3, 4, lambda: True))
    state.seal(SEAL, 1.0)
    (post,) = post_all(state)
    assert written([post]) == {layer * PEER_POOL + 6: layer * POOL + SOURCE[3] for layer in range(LAYERS)}
    state.done(post, 1.0)
    assert isinstance(state.due(), RowPost)


def test_the_row_waits_for_the_prompt_also_where_no_page_is_sent() -> None:
    state = fresh()
    bootstrap(state, DESTINATION._replace(pages=(), first_page=PAGES))
    state.computed(PARTS[0])
    assert state.due() is None
    state.seal(SEAL, 1.0)
    assert state.due() is None, "the prompt is not computed"
    state.computed(PARTS[1])
    state.computed(PARTS[2])
    assert isinstance(state.due(), RowPost)


def test_random_walks_keep_the_promises() -> None:
    """Any interleaving, with posts that fail before, in or after the post, and a close at any time."""
    rng = random.Random(3)
    ended = {Sent: 0, SendFailed: 0, Settled: 0}
    for _ in range(3000):
        state = fresh(rng.choice([1, 2, 5, 100]))
        todo: list[str | Computed] = ["bootstrap", "seal", *PARTS, *rng.choice([[], ["close"]])]
        rng.shuffle(todo)
        in_flight: list[Post] = []
        lost = 0
        done_blocks: set[int] = set()
        row_done = False
        events: list[TransferEvent] = []
        for _ in range(300):
            action = rng.choice(["step", "post", "post", "done", "done", "fail"])
            if action == "step" and todo:
                step = todo.pop()
                if isinstance(step, Computed):
                    state.computed(step)
                elif step == "bootstrap":
                    bootstrap(state)
                elif step == "seal":
                    state.seal(SEAL, 0.0)
                elif step == "close":
                    state.close()
            elif action == "post" and (post := state.due()) is not None:
                assert not state.closed
                assert state.error is None
                if isinstance(post, RowPost):
                    assert done_blocks == set(ALL_BLOCKS)
                    assert not in_flight
                    assert lost == 0
                state.posted(post, 0.0)
                in_flight.append(post)
            elif action == "done" and in_flight:
                post = in_flight.pop(rng.randrange(len(in_flight)))
                state.done(post, 1.0)
                done_blocks |= set() if isinstance(post, RowPost) else {int(to) for to in post.remote}
                row_done |= isinstance(post, RowPost)
            elif action == "fail" and in_flight and rng.random() < 0.05:
                in_flight.pop()
                lost += 1
                state.fail("lost")
            for event in told(state):
                assert type(event) not in {type(earlier) for earlier in events}, "told twice"
                events.append(event)
                if isinstance(event, Sent):
                    assert row_done
                    assert not in_flight
                    assert lost == 0
                if isinstance(event, Settled):
                    assert state.closed
                    assert not in_flight
                    assert lost == 0
        kinds = {type(event) for event in events}
        assert not {Sent, SendFailed} <= kinds
        assert (SendFailed in kinds) == (lost > 0)
        if state.closed and not in_flight:
            assert (Settled in kinds) == (lost == 0)
        for kind in kinds:
            ended[kind] += 1
    assert min(ended.values()) > 100, f"the walk reaches too little: {ended}"


def test_close_before_bootstrap_settles_at_once() -> None:
    state = fresh()
    state.computed(PARTS[0])
    state.close()
    assert told(state) == [Settled(5)]
    bootstrap(state)
    assert state.due() is None
    assert state.destination is None


def test_close_forbids_what_was_due_and_waits_for_what_was_posted() -> None:
    state = fresh(post_blocks=1)
    bootstrap(state)
    state.computed(PARTS[0])
    post = state.due()
    assert post is not None
    state.posted(post, 0.0)
    state.close()
    assert state.due() is None
    assert told(state) == []
    state.done(post, 0.0)
    state.close()
    assert told(state) == [Settled(5)]


def test_an_error_is_told_once_and_never_settles_while_its_handle_is_open() -> None:
    state = fresh(post_blocks=1)
    bootstrap(state)
    state.computed(PARTS[0])
    first, second = state.due(), None
    assert first is not None
    state.posted(first, 0.0)
    second = state.due()
    assert second is not None
    state.posted(second, 0.0)
    state.fail("first")
    state.fail("second")
    assert told(state) == [SendFailed(5, "first")]
    state.done(second, 0.0)
    state.close()
    assert told(state) == []


def test_an_error_with_nothing_in_flight_settles() -> None:
    state = fresh()
    state.fail("refused")
    state.close()
    assert told(state) == [SendFailed(5, "refused"), Settled(5)]


def test_nothing_fails_after_the_row() -> None:
    state = fresh()
    bootstrap(state)
    state.computed(Computed("k", 0, LAYERS, 0, PAGES))
    state.seal(SEAL, 0.0)
    for _ in ("pages", "row"):
        for post in post_all(state):
            state.done(post, 0.0)
    state.fail("too late")
    assert [type(event) for event in told(state)] == [Sent]


def test_a_repeated_bootstrap_changes_nothing_and_another_one_fails() -> None:
    state = fresh()
    bootstrap(state)
    state.computed(Computed("k", 0, LAYERS, 0, PAGES))
    bootstrap(state)
    assert written(post_all(state)) == ALL_BLOCKS
    bootstrap(state, DESTINATION._replace(row=2))
    assert [type(event) for event in told(state)] == [SendFailed]


def test_the_same_pages_from_another_place_on_are_another_destination() -> None:
    state = fresh()
    bootstrap(state)
    bootstrap(state, DESTINATION._replace(first_page=1))
    assert [type(event) for event in told(state)] == [SendFailed]


@pytest.mark.parametrize(
    "wrong",
    [
        DESTINATION._replace(pages=(1, 1, 2, 3)),
        DESTINATION._replace(pages=(1, 2, 3, PEER_POOL)),
        DESTINATION._replace(pages=(1, 2, 3, -1)),
        DESTINATION._replace(row=4),
        DESTINATION._replace(row=-1),
        DESTINATION._replace(pages=(1, 2, 3)),
        DESTINATION._replace(pages=(1, 2), first_page=1),
        DESTINATION._replace(pages=(), first_page=PAGES + 1),
        DESTINATION._replace(first_page=-1),
    ],
)
def test_a_wrong_destination_fails_before_any_post(wrong: Destination) -> None:
    state = fresh()
    bootstrap(state, wrong)
    state.computed(Computed("k", 0, LAYERS, 0, PAGES))
    assert state.due() is None
    assert [type(event) for event in told(state)] == [SendFailed]


@pytest.mark.parametrize(
    "parts",
    [
        [Computed("k", 0, LAYERS + 1, 0, 1)],
        [Computed("k", 0, LAYERS, 0, PAGES + 1)],
        [Computed("k", 1, 1, 0, 1)],
        [Computed("k", 0, 2, 0, 2), Computed("k", 1, 2, 1, 3)],
    ],
)
def test_parts_out_of_range_or_twice_fail(parts: list[Computed]) -> None:
    state = fresh()
    for part in parts:
        state.computed(part)
    assert [type(event) for event in told(state)] == [SendFailed]


@pytest.mark.parametrize("pages", [0, PAGES + 1])
def test_a_seal_of_other_pages_fails(pages: int) -> None:
    state = fresh()
    state.seal(SEAL._replace(pages=pages), 0.0)
    assert [type(event) for event in told(state)] == [SendFailed]


def test_posts_ascend_by_where_they_land() -> None:
    state = fresh(post_blocks=5)
    bootstrap(state)
    state.computed(Computed("k", 0, LAYERS, 0, PAGES))
    remote = np.concatenate([post.remote for post in post_all(state) if isinstance(post, PagePost)])
    assert (np.diff(remote) > 0).all()
    assert state.descriptors > 0


def test_a_part_goes_out_when_the_device_is_done_with_it() -> None:
    reached = 0

    def done(layer: int) -> Callable[[], bool]:
        return lambda: reached > layer

    marks = [Computed("k", i, i + 1, 0, PAGES, done(i)) for i in range(LAYERS)]
    state = fresh()
    bootstrap(state)
    for part in marks:
        state.computed(part)
    state.seal(SEAL, 1.0)
    for reached in range(1, LAYERS + 1):
        (post,) = post_all(state)
        assert isinstance(post, PagePost)
        assert {int(block) // POOL for block in post.local} == {reached - 1}
        assert state.due() is None
        state.done(post, 1.0)
        if reached < LAYERS:
            assert state.due() is None, "the row waits for every part"
    (row,) = post_all(state)
    assert isinstance(row, RowPost)


def test_a_room_that_waits_for_compute_has_nothing_pending() -> None:
    """So its thread sleeps until it is told more."""
    state = fresh()
    state.computed(Computed("k", 0, 1, 0, PAGES))
    assert not state.pending, "nobody published a destination"
    bootstrap(state)
    assert state.pending
    for post in post_all(state):
        state.done(post, 1.0)
    assert not state.pending
    state.seal(SEAL, 1.0)
    assert not state.pending, "the row waits for the other layers"
    state.computed(Computed("k", 1, LAYERS, 0, PAGES))
    for post in post_all(state):
        state.done(post, 1.0)
    assert state.pending, "the row"
    post_all(state)
    assert not state.pending


def test_a_closed_room_does_not_wait_for_the_device() -> None:
    state = fresh()
    bootstrap(state)
    state.computed(Computed("k", 0, LAYERS, 0, PAGES, lambda: False))
    assert state.due() is None
    assert state.pending
    state.close()
    assert not state.pending
    assert told(state) == [Settled(5)]
