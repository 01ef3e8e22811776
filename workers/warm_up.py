"""The first steps of a process, before any work comes."""

import logging

import torch

from kernels import AttentionBatch
from relay.log import event
from workers.engine.batch_draw import Draw, draw_rows
from workers.engine.kv_pool import KVPool
from workers.models import Model

log = logging.getLogger(__name__)

_DRAW = Draw(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, u=0.5)


@torch.inference_mode()
def warm_up(model: Model, kv: KVPool, tokens: int, max_rows: int) -> None:
    """The first pass and draw of each kind pay for memory, dispatch, CUDA graphs and whatever kernels are not
    compiled; that must not fall into a lease.

    A prompt of `tokens` tokens, or as many as the context and the pool hold, then steps of decodes, of which
    there will be `max_rows` at most.
    """
    tokens = min(tokens, model.config.context_length_tokens, kv.pages * kv.page_size)
    steps = [(1, tokens)] + [(rows, 1) for rows in model.kernels.warm_rows(max_rows)]
    for done, (rows, query) in enumerate(steps, 1):
        pages = range(-(-tokens // kv.page_size))
        batch = AttentionBatch([query] * rows, [tokens] * rows, [pages] * rows, kv.page_size)
        plan = model.kernels.plan(batch, model.device)
        ids = torch.zeros(batch.tokens, dtype=torch.int64, device=model.device)
        positions = torch.arange(tokens - query, tokens, device=model.device).repeat(rows)
        last = torch.arange(query - 1, batch.tokens, query, device=model.device)
        logits = model.forward(ids, positions, kv.tensor, plan, None, last)
        draw_rows(model.kernels, logits, logits.amax(dim=-1), [_DRAW] * rows)
        event(log, "warmed_up", rows=rows, query_tokens=query, step=done, of=len(steps))
