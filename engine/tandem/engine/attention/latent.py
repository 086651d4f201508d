"""Attention over a step's pages of latents, absorbed or expanded."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.attention.base import Metadata
from tandem.kernels import Backend
from tandem.kernels.attention import PagedBatch
from tandem.kernels.mla import mla_decode, mla_prefill

MOST_EXPANDED = 1 << 30
"""Maximum numbers of expanded keys and values of a batch. More would take many launches, of which a
CUDA graph has as many as its longest context requires."""


def latent_attention(
    q: Tensor, kv: Tensor, kv_b: Tensor, meta: Metadata, scale: float, backend: Backend | None
) -> Tensor:
    """Return the attention of q [tokens, heads, nope + rope]: [tokens, heads, value]. See
    ``mla_prefill`` for kv and kv_b."""
    n, found = meta.num_decodes, []
    if meta.decode is not None:
        found.append(_absorbed(q[:n], kv, kv_b, meta.decode, scale, backend))
    if meta.prefill is not None:
        attend = mla_prefill if _is_expanded(kv_b, meta.prefill) else _absorbed
        found.append(attend(q[n:], kv, kv_b, meta.prefill, scale, backend=backend))
    return found[0] if len(found) == 1 else torch.cat(found)


def _absorbed(
    q: Tensor, kv: Tensor, kv_b: Tensor, batch: PagedBatch, scale: float, backend: Backend | None
) -> Tensor:
    nope = q.shape[2] - (kv.shape[2] - kv_b.shape[2])
    latent = (q[..., :nope].transpose(0, 1) @ kv_b[:, :nope]).transpose(0, 1)
    attended = mla_decode(latent, q[..., nope:], kv, batch, scale, backend=backend)
    return (attended.transpose(0, 1) @ kv_b[:, nope:].transpose(1, 2)).transpose(0, 1)


def _is_expanded(kv_b: Tensor, batch: PagedBatch) -> bool:
    """Return whether expansion saves multiplications, for the longest chunk, and is in few parts.

    Each query and key of a head require 2 * rank - (nope + value) fewer. Each key is expanded by
    rank * (nope + value), which absorbed attention spends on each query.
    """
    queries, keys = batch.max_query_len, batch.max_seq_len
    both, rank = kv_b.shape[1:]
    if batch.num_sequences * keys * kv_b.shape[0] * both > MOST_EXPANDED:
        return False
    return queries * keys * (2 * rank - both) > (keys - queries) * rank * both
