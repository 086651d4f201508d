"""qk-norm, RoPE and KV write in plain torch, q and k rotated as one tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from tandem.kernels.narrow.codes import to_codes

from . import QKNorm, Rotation, SlotMapping


def rotary_kv(
    qkv: Tensor,
    kv: Tensor,
    rotation: Rotation,
    slot_mapping: SlotMapping,
    qk_norm: QKNorm | None,
    kv_scales: Tensor | None,
) -> Tensor:
    """See the wrapper."""
    tokens, all_heads, dim = qkv.shape
    kv_heads = kv.shape[2]
    heads = all_heads - 2 * kv_heads
    rotated = qkv[:, : heads + kv_heads]
    _rotate(rotated, heads, rotation, qk_norm)
    new = qkv[:, heads:].view(tokens, 2, kv_heads, dim)
    if kv_scales is not None:
        kv, new = kv.view(torch.uint8), to_codes(new, kv_scales.unsqueeze(2))
    places = kv.permute(0, 3, 1, 2, 4)
    places.index_put_((slot_mapping.blocks, slot_mapping.offsets), new)
    return qkv[:, :heads]


def rotary_q(q: Tensor, rotation: Rotation, qk_norm: QKNorm | None) -> Tensor:
    """See the wrapper."""
    _rotate(q, q.shape[1], rotation, qk_norm)
    return q


def _rotate(qk: Tensor, heads: int, rotation: Rotation, norm: QKNorm | None) -> None:
    """Norm and rotate in place: ``heads`` of q and then those of k."""
    normed = qk if norm is None else _norm(qk, heads, norm)
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    torch.addcmul(normed * cos, normed.roll(qk.shape[2] // 2, -1), sin, out=qk)


def _norm(qk: Tensor, heads: int, norm: QKNorm) -> Tensor:
    dim = qk.shape[-1:]
    q = rms_norm(qk[:, :heads], dim, norm.q_weight, norm.eps)
    k = rms_norm(qk[:, heads:], dim, norm.k_weight, norm.eps)
    return torch.cat((q, k), dim=1)
