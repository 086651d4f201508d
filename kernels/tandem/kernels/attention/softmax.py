"""Softmax attention in plain torch with every rule of `Scores`, for those that SDPA has not."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.attention.batch import Scores

ELEMENTS = 1 << 26
"""Maximum scores at a time: 256 MiB in float32."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, distance: Tensor, scores: Scores
) -> Tensor:
    """Return attention of q [n, heads, queries, dim] over k, v [n, kv_heads, keys, dim].

    `mask` is added to the scores; `distance` is the position of the key minus that of the query.
    Both are [n, 1, queries or 1, keys]. A query without keys gives zero if their values are zero.
    The sums are float32, the result is of q's dtype.
    """
    sequences, heads, queries, _ = q.shape
    step = max(1, ELEMENTS // max(1, sequences * heads * k.shape[2]))
    out = torch.empty_like(q)
    for start in range(0, queries, step):
        rows = slice(start, start + step)
        part = _weights(
            q[:, :, rows],
            k,
            None if mask is None else mask[:, :, rows],
            distance[:, :, rows],
            scores,
        )
        grouped = part.reshape(sequences, k.shape[1], -1, k.shape[2])
        out[:, :, rows] = (grouped @ v.float()).view(q[:, :, rows].shape)
    return out


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, distance: Tensor, rules: Scores) -> Tensor:
    """Return the softmax [n, heads, queries, keys]."""
    n, heads, queries, dim = q.shape
    grouped = q.float().reshape(n, k.shape[1], -1, dim)
    s = (grouped @ k.float().transpose(2, 3)).view(n, heads, queries, -1) * rules.scale
    if rules.softcap is not None:
        s = rules.softcap * torch.tanh(s / rules.softcap)
    if rules.slopes is not None:
        s = s + rules.slopes.view(-1, 1, 1) * distance
    if mask is not None:
        s = (s + mask).clamp(min=-1e30)  # finite, for a query without keys
    if rules.sinks is None:
        return torch.softmax(s, -1)
    sinks = rules.sinks.view(1, -1, 1, 1).expand(n, heads, queries, 1)
    return torch.softmax(torch.cat((s, sinks), -1), -1)[..., :-1]
