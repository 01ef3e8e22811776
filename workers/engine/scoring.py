"""Log probabilities of a prompt's own tokens, from the logits of the positions before them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from relay.prompt_logprobs import PromptLogprobs


def score(logits: Tensor, next_ids: Sequence[int], alternatives: int) -> PromptLogprobs:
    """`logits` float32 [n, vocab] of n positions, `next_ids` the token behind each of them.

    Under the model's own distribution, as `token_logprobs` says it of output tokens.
    """
    assert len(logits) == len(next_ids) > 0
    ids = torch.tensor(next_ids, device=logits.device)
    mass = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, ids[:, None])
    top = logits.topk(min(alternatives, logits.shape[1]), dim=-1)
    ranks = 1 + (logits > own).sum(dim=-1)
    shown = torch.cat((own, top.values), dim=1) - mass
    named = torch.cat((ids[:, None], top.indices), dim=1)
    return PromptLogprobs(named.int().cpu().numpy(), shown.cpu().numpy(), ranks.int().cpu().numpy())
