"""What one leg sends next, after whatever the server answered."""

import pytest

from relay.answers import EmitOutcome, Emitted, Prefilled
from relay.model_file import default_model_path
from relay.request import Claimed, Finish, Hold, Leg
from relay.sampling import SamplingParams
from relay.server_clock import ServerClock
from relay.stamps import Stamps
from relay.stretches import Stretch
from relay.tokenizer import Tokenizer
from workers.engine.messages import Ending, Produced, Prompted, Sampled
from workers.outbox import Outbox

OK = Emitted(EmitOutcome.OK)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


def claimed(emitted=(), **given) -> Claimed:
    return Claimed(
        hold=Hold("req_1", Leg.DECODE, 1, "key"),
        room=1,
        attempt=1,
        solo=False,
        prompt_ids=(1, 2, 3),
        emitted=tuple(emitted),
        params=SamplingParams(**({"max_tokens": 100} | given)),
        prefill_boot="P",
        left_ms=60_000.0,
        submitted_ms=0.0,
        clock=ServerClock(5000.0, 90.0),
    )


def produce(outbox, ids, start=0, ending=None, stop_token=None) -> None:
    for position, token in enumerate(ids, start):
        last = position == start + len(ids) - 1
        outbox.add(
            Produced("key", position, Sampled(token), ending if last else None, stop_token if last else None)
        )


def text_of(emission) -> str:
    held = emission.finish.text if emission.finish else ""
    return "".join(token.text for token in emission.tokens) + held


def test_sends_each_token_once(tokenizer):
    outbox = Outbox(tokenizer, claimed())
    assert not outbox.pending
    ids = tokenizer.encode("One two three four")
    produce(outbox, ids[:2])
    first = outbox.emission()
    assert (first.start_position, [t.token_id for t in first.tokens], first.finish) == (0, ids[:2], None)
    produce(outbox, ids[2:], start=2)
    outbox.answer(first, OK)
    second = outbox.emission()
    assert (second.start_position, [t.token_id for t in second.tokens]) == (2, ids[2:])
    assert text_of(first) + text_of(second) == "One two three four"
    outbox.answer(second, OK)
    assert not outbox.pending


def test_a_prompt_that_was_computed_here_is_told_once(tokenizer):
    outbox = Outbox(tokenizer, claimed())
    outbox.add(Produced("key", 0, Sampled(5), prompted=Prompted(16, (Stretch(97.5, 99.0, 3),))))
    for _ in range(2):
        emission = outbox.emission()
        assert emission.prefilled == Prefilled(Stamps(16, chunks=(Stretch(12_500.0, 14_000.0, 3),)))
    outbox.answer(emission, OK)
    outbox.add(Produced("key", 1, Sampled(5)))
    assert outbox.emission().prefilled is None


def test_sends_the_same_again_until_it_is_answered(tokenizer):
    outbox = Outbox(tokenizer, claimed())
    produce(outbox, tokenizer.encode("Again and"))
    assert outbox.emission() == outbox.emission()
    assert outbox.pending


def test_a_gap_reaches_back_into_earlier_attempts(tokenizer):
    ids = tokenizer.encode("The stream lost its last second of tokens")
    outbox = Outbox(tokenizer, claimed(emitted=ids[:5]))
    assert not outbox.pending
    produce(outbox, ids[5:7], start=5)
    emission = outbox.emission()
    assert emission.start_position == 5
    outbox.answer(emission, Emitted(EmitOutcome.GAP, 2))
    again = outbox.emission()
    assert (again.start_position, [t.token_id for t in again.tokens]) == (2, ids[2:7])
    assert text_of(again) == tokenizer.decode(ids[2:7])
    assert [t.position for t in again.tokens] == list(range(2, 7))


def test_a_long_backlog_goes_in_parts_and_the_end_with_the_last(tokenizer):
    outbox = Outbox(tokenizer, claimed(max_tokens=1000))
    ids = (tokenizer.encode(" word") * 700)[:700]
    produce(outbox, ids, ending=Ending.LENGTH)
    sent, calls = [], 0
    while True:
        emission = outbox.emission()
        calls += 1
        sent += [t.token_id for t in emission.tokens]
        if emission.finish:
            break
        outbox.answer(emission, OK)
    assert sent == ids
    assert calls == 3


def test_an_answer_that_does_not_go_with_the_emission(tokenizer):
    outbox = Outbox(tokenizer, claimed())
    produce(outbox, [5, 6])
    for answer in (Emitted(EmitOutcome.GAP, 0), Emitted(EmitOutcome.GAP, 7), Emitted(EmitOutcome.DONE)):
        with pytest.raises(ValueError, match="server answers"):
            outbox.answer(outbox.emission(), answer)


@pytest.mark.parametrize("position", [0, 2, 7])
def test_a_position_out_of_order(tokenizer, position):
    outbox = Outbox(tokenizer, claimed(emitted=[5]))
    with pytest.raises(ValueError, match="expected 1"):
        outbox.add(Produced("key", position, Sampled(9)))


def test_length_releases_what_was_held_back(tokenizer):
    outbox = Outbox(tokenizer, claimed(stop=("ending",)))
    produce(outbox, tokenizer.encode("wait for the end"), ending=Ending.LENGTH)
    emission = outbox.emission()
    assert emission.finish == Finish("length", None, "end")
    assert text_of(emission) == "wait for the end"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_has_no_text_of_its_own(tokenizer, include):
    ids = tokenizer.encode("stop here now")
    outbox = Outbox(tokenizer, claimed(stop_token_ids=(ids[-1],), include_stop_str_in_output=include))
    produce(outbox, ids, ending=Ending.STOP, stop_token=ids[-1])
    emission = outbox.emission()
    assert [t.token_id for t in emission.tokens] == ids
    assert emission.finish == Finish("stop", ids[-1], "")
    assert text_of(emission) == ("stop here now" if include else "stop here")


def test_a_stop_string_ends_the_request_and_what_follows_is_ignored(tokenizer):
    outbox = Outbox(tokenizer, claimed(stop=("two th",)))
    ids = tokenizer.encode("one two three four")
    produce(outbox, ids)
    emission = outbox.emission()
    assert emission.finish == Finish("stop", "two th", "")
    assert text_of(emission) == "one "
    assert [t.token_id for t in emission.tokens] == ids[: len(emission.tokens)]
    assert len(emission.tokens) < len(ids)


def test_a_stop_string_outranks_the_length(tokenizer):
    outbox = Outbox(tokenizer, claimed(stop=("four",)))
    produce(outbox, tokenizer.encode("three four"), ending=Ending.LENGTH)
    assert outbox.emission().finish == Finish("stop", "four", "")


def test_a_stream_that_already_holds_the_stop_string_is_finished(tokenizer):
    outbox = Outbox(tokenizer, claimed(emitted=tokenizer.encode("one two"), stop=("two",)))
    assert outbox.pending
    emission = outbox.emission()
    assert (list(emission.tokens), emission.finish) == ([], Finish("stop", "two", ""))


def test_logprobs_travel_with_their_token(tokenizer):
    outbox = Outbox(tokenizer, claimed(logprobs=1))
    logprobs = [[5, -0.1], [5, -0.1]]
    outbox.add(Produced("key", 0, Sampled(5, logprobs)))
    assert outbox.emission().tokens[0].logprobs == logprobs


def test_without_output_tokens_only_the_end_is_told(tokenizer):
    outbox = Outbox(tokenizer, claimed(max_tokens=0))
    produce(outbox, [tokenizer.encode("x")[0]], ending=Ending.STOP)
    emission = outbox.emission()
    assert (emission.start_position, list(emission.tokens)) == (0, [])
    assert emission.finish == Finish("length")
