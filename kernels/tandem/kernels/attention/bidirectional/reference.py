"""Bidirectional attention in plain torch: SDPA, sequence by sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, scale: float
) -> Tensor:
    """See the wrapper; ``max_len`` tells nothing here."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, stop in pairwise(cu_seqlens.tolist()):
        if stop > start:
            queries, keys, values = (
                each[start:stop].transpose(0, 1).unsqueeze(0) for each in (q, k, v)
            )
            attended = scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[start:stop] = attended[0].transpose(0, 1)
    return out
