"""How the next token of a request is chosen, as the client asked for it."""

import json
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the gateway, carried in the request record, applied by the sampler.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep all tokens. `logprobs` is the number of
    alternatives to report per token (0: only the chosen one, None: nothing), and `prompt_logprobs` that per
    token of the prompt. `max_tokens` counts output tokens over all attempts; with 0 the prompt is computed
    and nothing else. The random draw at output position p depends on (`seed`, p) alone.
    With `allowed_token_ids` no other token is ever chosen; `bad_words` are sequences of token ids whose last
    one is not chosen behind the others. `grammar` is one of relay/grammar.py. `cache_salt` says whose prefix
    cache may be used: None is everybody's.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int = 0
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def sample(self, index: int) -> "SamplingParams":
        """For another sample of the same prompt: its draws are its own. Index 0 is this one, and alone tells
        of the prompt."""
        if index == 0:
            return self
        digest = blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(digest) >> 1, prompt_logprobs=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "SamplingParams":
        raw = json.loads(text)
        raw["logit_bias"] = {int(token): bias for token, bias in raw["logit_bias"].items()}
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            raw[name] = tuple(raw[name])
        raw["bad_words"] = tuple(map(tuple, raw["bad_words"]))
        return cls(**raw)
