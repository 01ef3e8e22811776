"""What a client wants to see of tokens, beside their text."""

from dataclasses import dataclass

from relay.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Shown:
    """`logprobs` and `prompt_logprobs`: how many alternatives per token, None for no log probabilities at
    all. `ids_as_tokens` spells each token as `token_id:7`."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    ids_as_tokens: bool = False


def spelling(token_id: int, tokenizer: Tokenizer, ids_as_tokens: bool) -> str:
    return f"token_id:{token_id}" if ids_as_tokens else tokenizer.token_text(token_id)
