"""qk-norm, RoPE and KV write in Triton, one launch.

Roofline: qkv read once, its q and k and the cache's k and v written once.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tandem.kernels.launch import dependent
from tandem.kernels.launch.launcher import Launcher

from . import QKNorm, Rotation, SlotMapping
from .triton_kernels import rotate_heads

_rotate_heads = Launcher(rotate_heads)
_FEW_TOKENS = 128
"""Maximum tokens for which a program has few heads, so that one token is spread over several."""
_FEW_HEADS, _HEADS = 8, 16
"""Heads of a program, for few tokens and for many."""


def rotary_kv(
    qkv: Tensor,
    kv: Tensor,
    rotation: Rotation,
    slot_mapping: SlotMapping,
    qk_norm: QKNorm | None,
    kv_scales: Tensor | None,
) -> Tensor:
    """See the wrapper."""
    _launch(qkv, rotation, qk_norm, kv, slot_mapping, kv_scales)
    return qkv[:, : qkv.shape[1] - 2 * kv.shape[2]]


def rotary_q(q: Tensor, rotation: Rotation, qk_norm: QKNorm | None) -> Tensor:
    """See the wrapper."""
    _launch(q, rotation, qk_norm, None, SlotMapping(q, q), None)
    return q


def _launch(
    heads: Tensor,
    rotation: Rotation,
    qk_norm: QKNorm | None,
    kv: Tensor | None,
    slot_mapping: SlotMapping,
    kv_scales: Tensor | None,
) -> None:
    """Rotate [tokens, heads, head_dim]; without kv all of q, and slot_mapping is not read."""
    tokens, all_heads, dim = heads.shape
    if not tokens:
        return
    kv_heads = 0 if kv is None else kv.shape[2]
    strides = (0, 0, 0, 0) if kv is None else kv.stride()[:4]
    at_once = _FEW_HEADS if tokens <= _FEW_TOKENS else _HEADS
    _rotate_heads(
        (tokens, triton.cdiv(all_heads, at_once)),
        heads,
        heads if kv is None else kv,
        rotation.cos,
        rotation.sin,
        slot_mapping.blocks,
        slot_mapping.offsets,
        rotation.cos if kv_scales is None else kv_scales,
        heads if qk_norm is None else qk_norm.q_weight,
        heads if qk_norm is None else qk_norm.k_weight,
        rotation.cos.stride(0),
        rotation.sin.stride(0),
        *strides,
        0.0 if qk_norm is None else qk_norm.eps,
        HEADS=all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        D=dim,
        HALF=triton.next_power_of_2(dim // 2),
        AT_ONCE=at_once,
        NORM=qk_norm is not None,
        CODES=kv_scales is not None,
        num_warps=4,
        **dependent(heads.device),
    )
