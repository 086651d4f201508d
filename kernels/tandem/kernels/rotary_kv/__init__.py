"""One op between the qkv projection and attention: qk-norm, RoPE, KV write.

If queries are fewer than keys, `rotary_kv` takes k and v only and `rotary_q` the queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.narrow.codes import check_pages
from tandem.kernels.registry import Backend, Op


class Rotation(NamedTuple):
    """Angles of this step's tokens, gathered once for all layers."""

    cos: Tensor
    """[tokens, head_dim]: cos of the dim/2 frequencies, twice."""
    sin: Tensor
    """[tokens, head_dim]: -sin of the frequencies, then +sin (half-rotation layout)."""


class SlotMapping(NamedTuple):
    """Destinations of this step's tokens in the cache. Every token is written."""

    blocks: Tensor
    """int64 [tokens]."""
    offsets: Tensor
    """int64 [tokens], position within the block."""


class QKNorm(NamedTuple):
    """RMSNorm over each head of q and of k, before the rotation."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


RotaryKV = Callable[[Tensor, Tensor, Rotation, SlotMapping, QKNorm | None, Tensor | None], Tensor]
RotaryQ = Callable[[Tensor, Rotation, QKNorm | None], Tensor]

ROTARY_KV: Op[RotaryKV] = Op(
    "rotary_kv",
    {
        Backend.TORCH: "tandem.kernels.rotary_kv.reference:rotary_kv",
        Backend.TRITON: "tandem.kernels.rotary_kv.triton:rotary_kv",
        Backend.LLVM: "tandem.kernels.rotary_kv.llvm:rotary_kv",
    },
)
ROTARY_Q: Op[RotaryQ] = Op(
    "rotary_q",
    {
        Backend.TORCH: "tandem.kernels.rotary_kv.reference:rotary_q",
        Backend.TRITON: "tandem.kernels.rotary_kv.triton:rotary_q",
    },
)


def rotary_kv(
    qkv: Tensor,
    kv: Tensor,
    rotation: Rotation,
    slot_mapping: SlotMapping,
    qk_norm: QKNorm | None = None,
    kv_scales: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v to their slots, return q.

    x' = x * cos + (x rolled by half) * sin (Su et al., 2021, in the half-rotation layout of Llama).
    qkv is dense [tokens, heads + 2 * kv_heads, head_dim], maybe without query heads; q and k are
    overwritten. kv is one layer's strided view, [num_blocks, 2, kv_heads, block_size, head_dim];
    destinations are distinct. The result [tokens, heads, head_dim] is a view of `qkv`.

    kv has the type of qkv, or float8_e4m3fn with `kv_scales`, float32 [2, kv_heads]: k and v as
    qkv's type holds them are rounded to codes (`narrow/codes.py`).
    """
    checks.shape("kv", kv, None, 2, None, None, None)
    checks.shape("qkv", qkv, None, None, kv.shape[4])
    check_pages(kv, kv_scales, "qkv", qkv)
    checks.dense_last("kv", kv)
    if not qkv.is_contiguous() or qkv.shape[1] < 2 * kv.shape[2]:
        raise BadTensor(
            f"qkv has shape {tuple(qkv.shape)} and strides {qkv.stride()}, expected dense rows of "
            f"at least {2 * kv.shape[2]} heads"
        )
    _check_angles(rotation, qkv)
    checks.shape("slot_mapping.blocks", slot_mapping.blocks, qkv.shape[0])
    checks.shape("slot_mapping.offsets", slot_mapping.offsets, qkv.shape[0])
    checks.kind("slot_mapping.blocks", slot_mapping.blocks, torch.int64)
    checks.kind("slot_mapping.offsets", slot_mapping.offsets, torch.int64)
    return ROTARY_KV.on(qkv.device, backend)(qkv, kv, rotation, slot_mapping, qk_norm, kv_scales)


def rotary_q(
    q: Tensor,
    rotation: Rotation,
    qk_norm: QKNorm | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Norm and rotate q [tokens, heads, head_dim], dense, in place; return it."""
    checks.shape("q", q, None, None, None)
    if not q.is_contiguous():
        raise BadTensor(f"q has strides {q.stride()}, expected dense rows")
    _check_angles(rotation, q)
    return ROTARY_Q.on(q.device, backend)(q, rotation, qk_norm)


def _check_angles(rotation: Rotation, x: Tensor) -> None:
    for name, angle in (("cos", rotation.cos), ("sin", rotation.sin)):
        checks.shape(name, angle, x.shape[0], x.shape[2])
        checks.dense_last(name, angle)
