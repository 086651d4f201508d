"""Bidirectional attention in plain torch: SDPA, sequence by sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.kernels.attention.bidirectional.prompts import WholePrompts


def bidirectional(q: Tensor, k: Tensor, v: Tensor, prompts: WholePrompts, scale: float) -> Tensor:
    """See the wrapper; the bound of the lengths is not used."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, stop in pairwise(prompts.cu_seqlens.tolist()):
        if stop > start:
            queries, keys, values = (
                each[start:stop].transpose(0, 1).unsqueeze(0) for each in (q, k, v)
            )
            attended = scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[start:stop] = attended[0].transpose(0, 1)
    return out
