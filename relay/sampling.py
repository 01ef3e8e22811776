"""How the next token of a request is chosen, as the client asked for it."""

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the gateway, carried in the request record, applied by the sampler.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep all tokens. `logprobs` is the number of
    alternatives to report per token (0: only the chosen one, None: nothing). `max_tokens` counts output
    tokens over all attempts. The random draw at output position p depends on (`seed`, p) alone.
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

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "SamplingParams":
        raw = json.loads(text)
        raw["logit_bias"] = {int(token): bias for token, bias in raw["logit_bias"].items()}
        raw["stop"] = tuple(raw["stop"])
        raw["stop_token_ids"] = tuple(raw["stop_token_ids"])
        return cls(**raw)
