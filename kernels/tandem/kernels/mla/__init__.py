"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) over a paged cache of latents.

A token's row in a page is its latent, `rank` numbers, and then its rotated key, `rope` numbers,
which all heads share. A head's other key numbers and its value are products of the latent with its
rows of `kv_b`. `mla_decode` is absorbed: queries and results are products with `kv_b`, so a head
attends to latents. `mla_prefill` expands keys and values, in parts of bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.attention.batch import PagedBatch
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op
from tandem.kernels.rotary_kv import Rotation, SlotMapping


class LatentNorm(NamedTuple):
    """RMSNorm of a latent."""

    weight: Tensor
    """[rank]."""
    eps: float


WriteLatents = Callable[[Tensor, Tensor, Rotation, SlotMapping, LatentNorm], None]
RotatePairs = Callable[[Tensor, Rotation], Tensor]
MlaDecode = Callable[[Tensor, Tensor, Tensor, PagedBatch, float], Tensor]
MlaPrefill = Callable[[Tensor, Tensor, Tensor, PagedBatch, float], Tensor]

_TORCH, _TRITON = "tandem.kernels.mla.reference", "tandem.kernels.mla.triton"
LATENT_KV: Op[WriteLatents] = Op(
    "mla.latent_kv",
    {Backend.TORCH: f"{_TORCH}:latent_kv", Backend.TRITON: f"{_TRITON}:latent_kv"},
)
ROTARY_PAIRS: Op[RotatePairs] = Op(
    "mla.rotary_pairs",
    {Backend.TORCH: f"{_TORCH}:rotary_pairs", Backend.TRITON: f"{_TRITON}:rotary_pairs"},
)
MLA_DECODE: Op[MlaDecode] = Op(
    "mla.decode",
    {Backend.TORCH: f"{_TORCH}:mla_decode", Backend.TRITON: f"{_TRITON}:mla_decode"},
)
MLA_PREFILL: Op[MlaPrefill] = Op(
    "mla.prefill",
    {Backend.TORCH: f"{_TORCH}:mla_prefill", Backend.TRITON: f"{_TRITON}:mla_prefill"},
)


def latent_kv(
    kv_a: Tensor,
    kv: Tensor,
    rotation: Rotation,
    slot_mapping: SlotMapping,
    norm: LatentNorm,
    *,
    backend: Backend | None = None,
) -> None:
    """Norm the latents, rotate the shared keys, and write both to their slots.

    kv_a is [tokens, rank + rope], rows maybe strided, and is not changed. kv is one layer's strided
    view, [num_blocks, block_size, rank + rope], of the type of kv_a; destinations are distinct.
    Numbers 2 i and 2 i + 1 of a key are rotated by angle i. `rotation` is [tokens, rope].
    """
    checks.shape("kv", kv, None, None, None)
    checks.shape("kv_a", kv_a, None, kv.shape[2])
    checks.same("kv", kv, "kv_a", kv_a)
    rank, tokens = norm.weight.shape[0], kv_a.shape[0]
    checks.same("norm.weight", norm.weight, "kv_a", kv_a)
    for name, tensor in (("kv_a", kv_a), ("kv", kv)):
        checks.dense_last(name, tensor)
    _check_angles(rotation, tokens, kv.shape[2] - rank)
    for name, place in (("blocks", slot_mapping.blocks), ("offsets", slot_mapping.offsets)):
        checks.shape(f"slot_mapping.{name}", place, tokens)
        checks.kind(f"slot_mapping.{name}", place, torch.int64)
    LATENT_KV.on(kv_a.device, backend)(kv_a, kv, rotation, slot_mapping, norm)


def rotary_pairs(q: Tensor, rotation: Rotation, *, backend: Backend | None = None) -> Tensor:
    """Rotate the last `rope` numbers of each head of q [tokens, heads, dim] in place; return q.

    Pairs and angles are those of `latent_kv`. Heads are dense, rows of tokens may be strided.
    """
    checks.shape("q", q, None, None, None)
    checks.dense_last("q", q)
    if q.shape[1] > 1 and q.stride(1) != q.shape[2]:
        raise BadTensor(f"q has strides {q.stride()}, expected dense heads")
    _check_angles(rotation, q.shape[0], rotation.cos.shape[-1])
    if rotation.cos.shape[1] > q.shape[2]:
        raise BadTensor(f"{rotation.cos.shape[1]} numbers to rotate, of heads of {q.shape[2]}")
    return ROTARY_PAIRS.on(q.device, backend)(q, rotation)


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) of the latents, causal, [tokens, heads, rank], dense.

    q_latent is [tokens, heads, rank], q_rope [tokens, heads, rope]; k is a whole row of kv
    [num_blocks, block_size, rank + rope], the value its latent. A sequence may have any number of
    queries, its last tokens, which are written. One without keys gives zeros. Sums are float32.
    """
    checks.shape("q_latent", q_latent, None, None, None)
    checks.shape("q_rope", q_rope, *q_latent.shape[:2], None)
    checks.same("q_rope", q_rope, "q_latent", q_latent)
    checks.dense_last("q_latent", q_latent)
    checks.dense_last("q_rope", q_rope)
    _check_pages(kv, q_latent.shape[2] + q_rope.shape[2], "q_latent", q_latent, batch)
    return MLA_DECODE.on(kv.device, backend)(q_latent, q_rope, kv, batch, scale)


def mla_prefill(
    q: Tensor,
    kv: Tensor,
    kv_b: Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v over expanded keys and values, [tokens, heads, value], dense.

    q is [tokens, heads, nope + rope], with its rotated numbers last. kv_b is dense, [heads, nope +
    value, rank]: a head's rows for keys, then for values. kv and `batch` are as in `mla_decode`.
    Parts of the keys are merged by the logarithm of their sums.
    """
    checks.shape("q", q, None, None, None)
    checks.shape("kv_b", kv_b, q.shape[1], None, None)
    checks.same("kv_b", kv_b, "q", q)
    checks.dense_last("q", q)
    if not kv_b.is_contiguous():
        raise BadTensor(f"kv_b has strides {kv_b.stride()}, expected dense rows")
    checks.shape("kv", kv, None, None, None)
    nope = q.shape[2] - (kv.shape[2] - kv_b.shape[2])
    if not 0 < nope < min(kv_b.shape[1], q.shape[2]):
        raise BadTensor(
            f"q has {q.shape[2]} numbers a head, of which {nope} are not rotated by kv of "
            f"{kv.shape[2]} and kv_b of {tuple(kv_b.shape)}"
        )
    _check_pages(kv, kv.shape[2], "q", q, batch)
    return MLA_PREFILL.on(kv.device, backend)(q, kv, kv_b, batch, scale)


def _check_pages(kv: Tensor, width: int, name: str, q: Tensor, batch: PagedBatch) -> None:
    checks.shape("kv", kv, None, None, width)
    checks.same("kv", kv, name, q)
    if kv.stride(2) != 1 or kv.stride(1) != width:
        raise BadTensor(f"kv has strides {kv.stride()}, expected dense [token][number] pages")
    if batch.max_seq_len > batch.block_tables.shape[1] * kv.shape[1]:
        raise BadTensor(
            f"block_tables hold {batch.block_tables.shape[1]} blocks of {kv.shape[1]} tokens, "
            f"fewer than max_seq_len {batch.max_seq_len} needs"
        )


def _check_angles(rotation: Rotation, tokens: int, rope: int) -> None:
    if rope < 1 or rope % 2:
        raise BadTensor(f"{rope} numbers to rotate, expected an even number above 0")
    for name, angle in (("cos", rotation.cos), ("sin", rotation.sin)):
        checks.shape(name, angle, tokens, rope)
        checks.dense_last(name, angle)
