"""POST /generate: the API of SGLang's own clients, as a view of the same requests."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from flask import Blueprint, Response, jsonify, request
from pydantic import Field, model_validator
from redis.exceptions import RedisError

from app.fields.prompt import prompt_of_text
from app.fields.schema import CompletionBody, parse
from app.gateway.client import ClientGone
from app.gateway.errors import ApiError, invalid
from app.gateway.service import Service, service
from app.gateway.sse import DONE, PING, event_stream, frame
from app.gateway.strict import Strict
from app.generation.attendance import Attendance, client_left, refuse_failure
from app.generation.chunk_counts import ChunkCounts
from app.generation.shown_prompt import ShownPrompt
from app.generation.submit import current_body, submit_all
from relay.request import MAX_PRIORITY, Record, Token
from relay.tokens import End

resource = Blueprint("generate", __name__)

KIND = "generate"
_DEFAULT_TOKENS = 128
# Of a completion; here it stands beside the sampling parameters, or is not shown.
_APART = {
    *("stream", "stream_options", "prompt", "model", "request_id", "priority", "cache_salt", "best_of"),
    *("echo", "logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
}
Spell = Callable[[int], str | None]  # the text of a token, where that is shown
# What SGLang calls a sampling parameter, where it differs from the others' name for it.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}


class GenerateBody(Strict):
    """`sampling_params` are checked as the fields of a completion, by which they are carried out. A higher
    `priority` is served first, as SGLang has it."""

    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1)
    top_logprobs_num: int = Field(0, ge=0, le=20)
    return_text_in_logprobs: bool = False
    rid: str | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: str | None = None
    extra_key: str | None = None

    @model_validator(mode="after")
    def _one_input(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        for name, asked in (("logprob_start_len", 0), ("top_logprobs_num", 1)):
            if getattr(self, name) >= asked and not self.return_logprob:
                raise invalid(f"{name} is allowed with return_logprob: true only.", name)
        if self.extra_key is not None and self.cache_salt is not None:
            raise invalid("extra_key cannot be combined with cache_salt, which means the same.", "extra_key")
        return self

    @property
    def single(self) -> bool:
        """One prompt is answered by an object, a list of prompts by a list of them."""
        first = self.input_ids[0] if self.input_ids else 0
        return isinstance(self.text, str) or (self.text is None and isinstance(first, int))

    def as_completion(self) -> dict[str, Any]:
        """The same as fields of `/v1/completions`."""
        fields = {_NAMES.get(name, name): value for name, value in self.sampling_params.items()}
        fields.setdefault("max_tokens", _DEFAULT_TOKENS)
        fields["prompt"] = self.text if self.text is not None else self.input_ids
        fields["stream"] = self.stream
        fields["priority"] = -self.priority
        if self.return_logprob:
            fields["logprobs"] = self.top_logprobs_num
            fields["echo"] = self.logprob_start_len >= 0  # the prompt's too
        named = {"request_id": self.rid, "model": self.model, "cache_salt": self.cache_salt or self.extra_key}
        return fields | {name: value for name, value in named.items() if value is not None}


class Sample:
    """One answer as it grows: every chunk tells all of it so far."""

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        shows_logprobs: bool,
        leader: str,
        read: Callable[[str], Record | None],
        input_logprobs: Callable[[], dict[str, Any]],
        spell: Spell,
    ) -> None:
        """`read` reads the record of a request; that of the `leader` says what was cached of the prompt."""
        self.ended = False
        self._leader = leader
        self._read = read
        self._input_logprobs = input_logprobs
        self._spell = spell
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._shows_logprobs = shows_logprobs
        self._text = ""
        self._tokens: list[Token] = []
        self._finish: dict[str, Any] | None = None

    def add(self, item: list[Token] | End) -> None:
        """Raises ApiError unless the end is that of a finished request."""
        if isinstance(item, End):
            refuse_failure(item)
            self.ended = True
            self._text += item.text
            self._finish = _finish(item, len(self._tokens))
        else:
            self._tokens += item
            self._text += "".join(token.text for token in item)

    def grown(self, item: list[Token] | End) -> Iterator[dict[str, Any]]:
        """What is told after each token, in whatever pieces they come. Raises ApiError as `add` does."""
        for part in [item] if isinstance(item, End) else [[token] for token in item]:
            self.add(part)
            yield self.view()

    def view(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "id": self._request_id,
            "finish_reason": self._finish,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self._tokens),
            "cached_tokens": 0,
        }
        if self._shows_logprobs:
            about |= self._logprobs()
        if self.ended:
            about |= self._recorded()
        return {
            "text": self._text,
            "output_ids": [token.token_id for token in self._tokens],
            "meta_info": about,
        }

    def _recorded(self) -> dict[str, Any]:
        """By the record, so that a repeat with the same key is told the same."""
        own = self._read(self._request_id)
        leader = own if self._leader == self._request_id else self._read(self._leader)
        took_ms = own.timings.ended - own.timings.submitted if own else 0.0
        return {"cached_tokens": leader.cached_tokens if leader else 0, "e2e_latency": took_ms / 1000}

    def _logprobs(self) -> dict[str, Any]:
        """Of each token; the alternatives follow the chosen one."""
        spell = self._spell
        shown = [
            [_entry(value, int(i), spell) for i, value in token.logprobs or []] for token in self._tokens
        ]
        return self._input_logprobs() | {
            "output_token_logprobs": [pairs[0] for pairs in shown if pairs],
            "output_top_logprobs": [pairs[1:] for pairs in shown if pairs],
        }


def _finish(end: End, tokens: int) -> dict[str, Any]:
    if end.finish_reason == "length":
        return {"type": "length", "length": tokens}
    return {"type": "stop", "matched": end.stop_reason}


def _entry(value: float | None, token_id: int, spell: Spell) -> list[Any]:
    return [value, token_id, spell(token_id)]


def _input_logprobs(prompt: ShownPrompt, start: int, wanted: int, spell: Spell) -> dict[str, Any]:
    """From token `start` on, whose own is null; of none for -1. Raises ApiError."""
    if start < 0:
        return {"input_token_logprobs": []}
    own = [_entry(value, token_id, spell) for token_id, value in prompt.likelihoods(start)]
    shown: dict[str, list[Any]] = {"input_token_logprobs": [_entry(None, prompt.ids[start], spell), *own]}
    if wanted:
        best = [
            [_entry(value, token_id, spell) for token_id, value in each]
            for each in prompt.best(start, wanted)
        ]
        shown["input_top_logprobs"] = [None, *best]
    return shown


def _record(s: Service, request_id: str) -> Record | None:
    """None: it cannot be read now."""
    try:
        return s.rooms.record(request_id)
    except RedisError:
        return None


@resource.post("/generate")
def generate() -> Response:
    raw = current_body()
    asked = parse(GenerateBody, raw.fields)
    if apart := sorted(_APART.intersection(asked.sampling_params)):
        raise invalid(f"sampling_params may not hold {apart[0]}.", "sampling_params")
    body = parse(CompletionBody, asked.as_completion())
    s = service()
    s.check_free_thread()
    prompts = [prompt_of_text(s, body, prompt) for prompt in body.prompts]
    if asked.logprob_start_len >= (shortest := min(map(len, prompts))):
        raise invalid(
            f"logprob_start_len must be below the {shortest} tokens of the prompt.", "logprob_start_len"
        )
    accepted = submit_all(s, KIND, body, prompts, raw.digest, body.n)
    samples = []
    spell: Spell = s.tokenizer.token_text if asked.return_text_in_logprobs else lambda _: None
    for number, (ids, leader) in enumerate(zip(prompts, accepted.leaders, strict=True)):
        prompt = ShownPrompt(ids, body.shown, s.tokenizer, partial(s.rooms.scores, leader))
        start, wanted = asked.logprob_start_len, asked.top_logprobs_num
        shown = cache(partial(_input_logprobs, prompt, start, wanted, spell))
        samples += [
            Sample(request_id, len(ids), asked.return_logprob, leader, partial(_record, s), shown, spell)
            for request_id in accepted.request_ids[number * body.n : (number + 1) * body.n]
        ]
    counts = ChunkCounts(len(samples), accepted.goes_on)
    attendance = Attendance(s, KIND, accepted, request.environ)
    alone = asked.single and body.n == 1
    if asked.stream:
        return event_stream(_frames(attendance, samples, alone, counts), attendance.leave)
    try:
        return _whole(attendance, samples, alone)
    finally:
        attendance.leave()


def _whole(attendance: Attendance, samples: list[Sample], alone: bool) -> Response:
    try:
        for found in attendance.events_of_all():
            if found:
                index, item = found
                samples[index].add(item)
    except ClientGone:
        return client_left().response()
    views = [sample.view() for sample in samples]
    return jsonify(views[0] if alone else views)


def _frames(attendance: Attendance, samples: list[Sample], alone: bool, counts: ChunkCounts) -> Iterator[str]:
    try:
        for found in attendance.events_of_all():
            if not found:
                yield PING
                continue
            index, item = found
            place = {} if alone else {"index": index}
            for view in samples[index].grown(item):
                if counts.count(index):
                    yield counts.name() + frame(view | place)
        counts.check_end()
    except ClientGone:
        return
    except ApiError as error:
        yield frame(error.body())
    yield DONE
