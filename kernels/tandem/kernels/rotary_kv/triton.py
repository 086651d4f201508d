"""qk-norm, RoPE and KV write in Triton, one launch.

Roofline: qkv read once, its q and k and the cache's k and v written once. At decode sizes it is the
latency of one launch: a program has 8 heads, so that even one token is spread.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tandem.kernels.launch import dependent

from . import QKNorm, Rotation, Slots
from .triton_kernels import rotate_heads

_AT_ONCE = 8


def rotary_kv(
    qkv: Tensor, kv: Tensor, rotation: Rotation, slots: Slots, qk_norm: QKNorm | None
) -> Tensor:
    """See the wrapper."""
    tokens, all_heads, dim = qkv.shape
    kv_heads = kv.shape[2]
    heads = all_heads - 2 * kv_heads
    if tokens:
        rotate_heads[(tokens, triton.cdiv(all_heads, _AT_ONCE))](
            qkv,
            kv,
            rotation.cos,
            rotation.sin,
            slots.blocks,
            slots.offsets,
            qkv if qk_norm is None else qk_norm.q_weight,
            qkv if qk_norm is None else qk_norm.k_weight,
            rotation.cos.stride(0),
            rotation.sin.stride(0),
            kv.stride(0),
            kv.stride(1),
            kv.stride(2),
            kv.stride(3),
            0.0 if qk_norm is None else qk_norm.eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=dim,
            HALF=triton.next_power_of_2(dim // 2),
            AT_ONCE=_AT_ONCE,
            NORM=qk_norm is not None,
            num_warps=2,
            **dependent(qkv.device),
        )
    return qkv[:, :heads]
