"""Log-probabilities and ranks in plain torch."""

from __future__ import annotations

from torch import Tensor

from .types import TokenScores


def score_tokens(logits: Tensor, ids: Tensor, top: int) -> TokenScores:
    """See the wrapper."""
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, ids.unsqueeze(1))
    best = logits.topk(min(top, logits.shape[1]), dim=-1)
    return TokenScores(
        logprobs=(chosen - total).squeeze(1),
        ranks=(logits > chosen).sum(-1) + 1,
        top_ids=best.indices,
        top_logprobs=best.values - total,
    )
