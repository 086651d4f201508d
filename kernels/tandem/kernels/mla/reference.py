"""Latent attention in plain torch: per sequence, gather its latents and attend in float32."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch
from tandem.kernels.norm.reference import rms_norm
from tandem.kernels.rotary_kv import Rotation, SlotMapping

from . import LatentNorm

ELEMENTS = 1 << 26
"""Maximum scores at a time: 256 MiB in float32."""
EXPANDED = 1 << 25
"""Maximum numbers of expanded keys and values at a time: 128 MiB in float32."""


class _Sequence(NamedTuple):
    start: int
    stop: int
    """Rows of its queries."""
    length: int
    blocks: Tensor


def latent_kv(
    kv_a: Tensor,
    kv: Tensor,
    rotation: Rotation,
    slot_mapping: SlotMapping,
    norm: LatentNorm,
) -> None:
    """See the wrapper."""
    rank = norm.weight.shape[0]
    latents = rms_norm(kv_a[:, :rank], norm.weight, norm.eps)
    keys = _rotated(kv_a[:, rank:], rotation.cos, rotation.sin)
    row = torch.cat((latents, keys), 1)
    kv.index_put_((slot_mapping.blocks, slot_mapping.offsets), row)


def rotary_pairs(q: Tensor, rotation: Rotation) -> Tensor:
    """See the wrapper."""
    part = q[..., q.shape[2] - rotation.cos.shape[1] :]
    part.copy_(_rotated(part, rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)))
    return q


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    c, s = cos[..., :half].float(), sin[..., half:].float()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2).to(x.dtype)


def mla_decode(
    q_latent: Tensor, q_rope: Tensor, kv: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    """See the wrapper."""
    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    rank = q_latent.shape[2]
    for each in _sequences(batch, kv):
        rows = _latents(kv, each)
        q = torch.cat((q_latent[each.start : each.stop], q_rope[each.start : each.stop]), 2)
        found = out[each.start : each.stop]
        step = max(1, ELEMENTS // (q.shape[1] * each.length))
        for at in range(0, len(q), step):
            scores = q[at : at + step].float() @ rows.T * scale
            _hide(scores, each.length - len(q) + at, 0)
            found[at : at + step] = scores.softmax(-1) @ rows[:, :rank]
    return out


def mla_prefill(q: Tensor, kv: Tensor, kv_b: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """See the wrapper."""
    heads, both, rank = kv_b.shape
    nope = q.shape[2] - (kv.shape[2] - rank)
    out = q.new_zeros(q.shape[0], heads, both - nope)
    step = max(1, EXPANDED // (heads * both))
    weight = kv_b.float()
    for each in _sequences(batch, kv):
        rows = _latents(kv, each)
        state = _Merged(q[each.start : each.stop].float() * scale, each.length)
        for at in range(0, each.length, step):
            part = rows[at : at + step]
            made = torch.einsum("kr,hnr->hkn", part[:, :rank], weight)
            shared = part[:, rank:].expand(heads, -1, -1)
            state.add(torch.cat((made[..., :nope], shared), 2), made[..., nope:], at)
        out[each.start : each.stop] = state.result()
    return out


class _Merged:
    """Attention of one sequence over parts of its keys, which are merged as in FlashAttention."""

    def __init__(self, q: Tensor, length: int) -> None:
        """q is float32 [queries, heads, dim], scaled: the last tokens of ``length``."""
        self._q = q.transpose(0, 1)
        self._first = length - len(q)
        self._top = q.new_full((*self._q.shape[:2], 1), -torch.inf)
        self._total = torch.zeros_like(self._top)
        self._sum: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, start: int) -> None:
        """Attend to keys [heads, keys, dim] of tokens from ``start`` on, with values."""
        if self._sum is None:
            self._sum = v.new_zeros(*self._q.shape[:2], v.shape[2])
        step = max(1, ELEMENTS // (k.shape[0] * k.shape[1]))
        for at in range(0, self._q.shape[1], step):
            if self._first + at + step <= start:
                continue
            rows = slice(at, at + step)
            scores = self._q[:, rows] @ k.transpose(1, 2)
            _hide(scores.transpose(0, 1), self._first + at, start)
            top = torch.maximum(self._top[:, rows], scores.amax(-1, keepdim=True))
            base = top.clamp(min=torch.finfo(top.dtype).min)  # no key yet: all weights are 0
            weights, old = (scores - base).exp(), (self._top[:, rows] - base).exp()
            self._total[:, rows] = self._total[:, rows] * old + weights.sum(-1, keepdim=True)
            self._sum[:, rows] = self._sum[:, rows] * old + weights @ v
            self._top[:, rows] = top

    def result(self) -> Tensor:
        """Return [queries, heads, value]."""
        assert self._sum is not None, "a sequence with queries has keys"
        return (self._sum / self._total).transpose(0, 1)


def _hide(scores: Tensor, position: int, key: int) -> None:
    """Mask scores [queries, .., keys] of keys after each query. ``position`` is that of the first
    query, ``key`` that of the first key."""
    queries, keys = scores.shape[0], scores.shape[-1]
    if key + keys - 1 <= position:
        return
    at = torch.arange(queries, device=scores.device).unsqueeze(1) + position
    hidden = torch.arange(keys, device=scores.device) + key > at
    scores.masked_fill_(hidden.view(queries, *[1] * (scores.dim() - 2), keys), -torch.inf)


def _latents(kv: Tensor, sequence: _Sequence) -> Tensor:
    """Return a sequence's rows in float32 [length, rank + rope]."""
    return kv[sequence.blocks].flatten(0, 1)[: sequence.length].float()


def _sequences(batch: PagedBatch, kv: Tensor) -> list[_Sequence]:
    """Return the sequences that have keys and queries; a batch's layers share them."""
    key = ("mla.torch", kv.shape[1])
    if key not in batch.memo:
        starts, lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
        tables, page = batch.block_tables.long(), kv.shape[1]
        batch.memo[key] = [
            _Sequence(starts[s], starts[s + 1], length, tables[s, : -(-length // page)])
            for s, length in enumerate(lens)
            if length and starts[s + 1] > starts[s]
        ]
    return cast("list[_Sequence]", batch.memo[key])
