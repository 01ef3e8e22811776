"""The ledger of a record, and log probabilities in the forms of the OpenAI API."""

import math

from app.gateway.sse import frame
from app.generation.logprobs import chat_logprobs, completion_logprobs
from app.generation.view import LEAST_LOGPROB, ledger, record_view
from relay.model_file import default_model_path
from relay.request import Record, State, Timings, Token
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer


def record(timings: Timings, state: State = State.FINISHED) -> Record:
    return Record(
        "r", state, "request", "", SamplingParams(9), 4, 3, 2, 1, 0, "stop", None, None, None, timings
    )


def test_the_ledger_has_every_span_in_ms() -> None:
    timings = Timings(
        submitted=1000,
        claimed=1010,
        published=1015,
        prefill_start=1012,
        prefill_end=1052,
        ready=1060,
        decode_claimed=1011,
        first_token=1063,
        ended=1163,
        transfer_us=8000,
        transfer_bytes=64,
        transfer_descriptors=2,
        spared_bytes=32,
    )
    assert ledger(record(timings)) == {
        "queued": 10,
        "bootstrap": 5,
        "prefill": 40,
        "transfer": {"exposed_ms": 8, "bytes": 64, "spared_bytes": 32, "descriptors": 2},
        "admit": 3,
        "first_token": 63,
        "decode": 100,
        "total": 163,
        "attempts": 1,
        "retractions": 0,
    }


def test_what_has_not_happened_is_null() -> None:
    view = record_view(record(Timings(submitted=1000), State.QUEUED), "m")
    spans = ("queued", "bootstrap", "prefill", "transfer", "admit", "first_token", "decode", "total")
    assert [view["ledger"][span] for span in spans] == [None] * 8
    assert view["usage"]["total_tokens"] == 7


def test_the_first_token_of_an_earlier_attempt_makes_no_negative_span() -> None:
    assert ledger(record(Timings(submitted=1, ready=50, first_token=20)))["admit"] is None


def test_json_has_no_infinity() -> None:
    token = Token(0, 5, "x", [[5, -math.inf]])
    tokenizer = Tokenizer.load(default_model_path())
    shown = completion_logprobs([token], 0, 0, tokenizer)
    assert shown["token_logprobs"] == [LEAST_LOGPROB]
    assert "Infinity" not in frame(shown)


def test_the_best_are_shown_whether_or_not_the_chosen_one_is_among_them() -> None:
    tokenizer = Tokenizer.load(default_model_path())
    apart = Token(0, 5, "", [[5, -3.0], [6, -1.0], [7, -2.0]])
    among = Token(0, 6, "", [[6, -1.0], [6, -1.0], [7, -2.0]])
    for token in (apart, among):
        (entry,) = chat_logprobs([token], 2, tokenizer)["content"]
        assert [best["logprob"] for best in entry["top_logprobs"]] == [-1.0, -2.0]
        assert entry["logprob"] == token.logprobs[0][1] if token.logprobs else False


def test_a_token_that_is_part_of_a_character_shows_its_bytes() -> None:
    tokenizer = Tokenizer.load(default_model_path())
    ids = tokenizer.encode("\U0001f98a", add_special_tokens=False)
    assert len(ids) > 1
    tokens = [Token(i, token_id, "", [[token_id, -1.0]]) for i, token_id in enumerate(ids)]
    content = chat_logprobs(tokens, 0, tokenizer)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "\U0001f98a"


def test_a_frame_is_one_line_of_data() -> None:
    assert frame({"a": "x\ny"}, event="end", event_id=3) == 'id: 3\nevent: end\ndata: {"a":"x\\ny"}\n\n'
