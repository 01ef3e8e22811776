"""What all bodies share: how to choose tokens, when to stop, and what to tell about it."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from app.fields.shown import Shown
from app.fields.structure import Structure, only_grammar
from app.gateway.errors import invalid
from relay.grammar import Grammars
from relay.request import MAX_PRIORITY
from relay.sampling import SamplingParams
from relay.tokenizer import Tokenizer

MAX_LOGPROBS = 20
MAX_STOPS = 4
MAX_BAD_WORDS = 256


def _check_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"holds {len(stops)} texts; at most {MAX_STOPS} are allowed")
    if not all(stops):
        raise ValueError("must not hold an empty text")
    return stops


def _check_logit_bias(value: Any) -> Any:
    if not isinstance(value, dict) or not all(_is_token_id(token) for token in value):
        raise ValueError("must be an object with token ids as keys")
    return {int(token): bias for token, bias in value.items()}


def _is_token_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


Stops = Annotated[list[str], BeforeValidator(_check_stop, json_schema_input_type=str | list[str])]
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[
    dict[int, Bias], BeforeValidator(_check_logit_bias, json_schema_input_type=dict[str, Bias])
]
Word = Annotated[str, Field(min_length=1, max_length=256)]


class SamplingFields(Structure):
    """`logprobs` differs between bodies. `max_tokens` is the older name of `max_completion_tokens`. `timeout`
    is in seconds."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    bad_words: list[Word] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    stop: Stops = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Either value gives the same text: it is the bytes of the tokens."""
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=1 << 31)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    timeout: float | None = Field(None, gt=0)
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,128}$")
    """Another way to send X-Request-Id."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def output_tokens(self) -> int | None:
        """The limit on output tokens that the client set."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Alternatives to report per token, None: no logprobs at all."""
        raise NotImplementedError

    @property
    def logprobs_needed(self) -> int | None:
        """The same, also for what the client does not see."""
        return self.top_logprobs_wanted

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def shown(self) -> Shown:
        return Shown(
            self.top_logprobs_wanted,
            self.prompt_logprobs,
            self.return_token_ids,
            self.return_tokens_as_token_ids,
        )

    def params(self, max_tokens: int, seed: int, tokenizer: Tokenizer, grammars: Grammars) -> SamplingParams:
        """What the sampler needs. `seed` is used unless the client sent one. Raises ApiError."""
        if self.min_tokens > max_tokens:
            raise invalid(f"min_tokens {self.min_tokens} is above max_tokens {max_tokens}.", "min_tokens")
        named = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for param, ids in named.items():
            if any(not 0 <= i < tokenizer.vocab_size for i in ids):
                vocabulary = f"the vocabulary of {tokenizer.vocab_size}"
                raise invalid(f"{param} names a token outside {vocabulary}.", param)
        greedy = self.temperature < 1e-5
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_k=0 if greedy else max(self.top_k, 0),
            top_p=1.0 if greedy else self.top_p,
            min_p=0.0 if greedy else self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=tuple(sorted(set(self.allowed_token_ids or ()))),
            bad_words=spellings(self.bad_words, tokenizer),
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs_needed,
            prompt_logprobs=self.prompt_logprobs_wanted,
            seed=(seed if self.seed is None else self.seed) % (1 << 63),
            skip_special_tokens=self.skip_special_tokens,
            grammar=only_grammar(self.structures(tokenizer), grammars),
            cache_salt=self.cache_salt,
        )


def spellings(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word as it stands, and of it behind a space: most tokenizers tell these apart."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(dict.fromkeys(ids for ids in found if ids))
