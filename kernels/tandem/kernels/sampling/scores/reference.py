"""Log-probabilities and ranks in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.sampling.types import TokenScores

_LOW = 0xFFFFFFFF


def score_tokens(logits: Tensor, ids: Tensor, top: int) -> TokenScores:
    """See the wrapper."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, ids.unsqueeze(1))
    values, best = best_first(logits, top)
    return TokenScores(
        logprobs=(chosen - total).squeeze(1),
        ranks=(logits > chosen).sum(-1) + 1,
        top_ids=best,
        top_logprobs=values - total,
    )


def best_first(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best logits of each row and their ids; of equals the lowest id first.

    float32 [rows, vocabulary] to float32 and int64 [rows, count]. `topk` orders equals arbitrarily,
    so it gets integers that order by logit, then by id.
    """
    if not count:
        return logits[:, :0], logits.new_empty(logits.shape[0], 0, dtype=torch.int64)
    bits = (logits + 0.0).view(torch.int32)
    bits = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    turned = _LOW - torch.arange(logits.shape[1], device=logits.device)
    ids = _LOW - (bits.long() << 32).bitwise_or_(turned).topk(count).values.bitwise_and_(_LOW)
    return logits.gather(1, ids), ids
