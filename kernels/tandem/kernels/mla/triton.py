"""Latent attention in Triton, for any GPU.

Grids depend on shapes and on the batch's upper bounds only. Rooflines: `latent_kv` and
`rotary_pairs` bytes; `mla_decode` bytes of the latents, and with many heads operations;
`mla_prefill` operations.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from tandem.kernels.attention.batch import LEAST_DIM, PagedBatch, padded
from tandem.kernels.launch import sm_count
from tandem.kernels.rotary_kv import Rotation, SlotMapping

from . import LatentNorm
from .triton_kernels import (
    attend_expanded,
    attend_latents,
    expand_latents,
    merge_splits,
    rotate_pairs,
    write_latents,
)

_HEADS = 16
"""Heads that a program rotates."""
_LEAST_SPLIT = 256
"""Keys of a part for which another program is worth its launch."""
_MOST_SPLITS = 64
EXPANDED_BYTES = 256 << 20
"""Maximum bytes of expanded keys and values at a time."""


def _wide(size: int) -> int:
    return max(LEAST_DIM, padded(size))


def latent_kv(
    kv_a: Tensor,
    kv: Tensor,
    rotation: Rotation,
    slot_mapping: SlotMapping,
    norm: LatentNorm,
) -> None:
    """See the wrapper."""
    tokens, rank = kv_a.shape[0], norm.weight.shape[0]
    rope = kv.shape[2] - rank
    if not tokens:
        return
    write_latents[(tokens,)](
        kv_a,
        kv,
        rotation.cos,
        rotation.sin,
        slot_mapping.blocks,
        slot_mapping.offsets,
        norm.weight,
        kv_a.stride(0),
        kv.stride(0),
        kv.stride(1),
        rotation.cos.stride(0),
        rotation.sin.stride(0),
        norm.eps,
        RANK=rank,
        ROPE=rope,
        WIDTH=padded(rank),
        HALF=padded(rope // 2),
        num_warps=4,
    )


def rotary_pairs(q: Tensor, rotation: Rotation) -> Tensor:
    """See the wrapper."""
    tokens, heads, dim = q.shape
    rope = rotation.cos.shape[1]
    if not tokens:
        return q
    rotate_pairs[(tokens, triton.cdiv(heads, _HEADS))](
        q,
        rotation.cos,
        rotation.sin,
        q.stride(0),
        rotation.cos.stride(0),
        rotation.sin.stride(0),
        HEADS=heads,
        D=dim,
        ROPE=rope,
        HALF=padded(rope // 2),
        AT_ONCE=_HEADS,
        num_warps=4,
    )
    return q


def mla_decode(
    q_latent: Tensor, q_rope: Tensor, kv: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    """See the wrapper."""
    tokens, heads, rank = q_latent.shape
    rope, page = q_rope.shape[2], kv.shape[1]
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    if not tokens or not batch.num_sequences:
        return out
    narrow = q_latent.dtype == torch.float32
    rows = LEAST_DIM if narrow else min(64, _wide(heads))
    row_tiles = triton.cdiv(batch.max_query_len * heads, rows)
    splits = _splits(row_tiles * batch.num_sequences, batch.max_seq_len, sm_count(kv.device))
    parts = stats = out
    if splits > 1:
        shape = (splits, tokens, heads)
        parts = torch.empty(*shape, rank, dtype=torch.float32, device=kv.device)
        stats = torch.empty(shape, dtype=torch.float32, device=kv.device)
    attend_latents[(row_tiles, batch.num_sequences, splits)](
        q_latent,
        q_rope,
        kv,
        batch.block_tables,
        batch.seq_lens,
        batch.cu_seqlens_q,
        out,
        parts,
        stats,
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        kv.stride(0),
        batch.block_tables.stride(0),
        tokens,
        splits,
        scale * math.log2(math.e),
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        WIDTH=_wide(rank),
        ROPE_WIDTH=_wide(rope),
        PAGE=page,
        BM=rows,
        BN=min(page, 16 if narrow else 32),
        WHOLE=splits == 1,
        STAGES=2,
        num_warps=8,
    )
    if splits > 1:
        merge_splits[(tokens * heads,)](
            parts, stats, out, tokens * heads, splits, RANK=rank, WIDTH=_wide(rank), num_warps=4
        )
    return out


def _splits(programs: int, keys: int, processors: int) -> int:
    """Return the parts of each sequence's keys: enough that every multiprocessor has a program."""
    return max(1, min(-(-processors // programs), keys // _LEAST_SPLIT, _MOST_SPLITS))


def mla_prefill(q: Tensor, kv: Tensor, kv_b: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """See the wrapper."""
    tokens, heads, dim = q.shape
    both, rank = kv_b.shape[1:]
    rope, page, sequences = kv.shape[2] - rank, kv.shape[1], batch.num_sequences
    nope = dim - rope
    value = both - nope
    out = torch.empty(tokens, heads, value, dtype=q.dtype, device=q.device)
    if not tokens or not sequences:
        return out
    narrow = q.dtype == torch.float32
    tile = min(page, 16 if narrow else 64)
    most = EXPANDED_BYTES // (sequences * heads * both * q.element_size())
    room = max(tile, min(most, batch.max_seq_len + tile - 1) // tile * tile)
    expanded = torch.empty(sequences, room, heads, both, dtype=q.dtype, device=q.device)
    kept = tokens if room < batch.max_seq_len else 0
    sums = torch.empty(kept, heads, value, dtype=torch.float32, device=q.device)
    stats = torch.empty(kept, heads, 2, dtype=torch.float32, device=q.device)
    rows = LEAST_DIM if narrow else 64
    for begin in range(0, batch.max_seq_len, room):
        expand_latents[(room // tile, heads, sequences)](
            kv,
            kv_b,
            batch.block_tables,
            batch.seq_lens,
            expanded,
            kv.stride(0),
            batch.block_tables.stride(0),
            begin,
            room,
            HEADS=heads,
            RANK=rank,
            ROPE=rope,
            BOTH=both,
            WIDTH=_wide(both),
            PAGE=page,
            TILE=tile,
            BK=min(64, _wide(rank)),
            num_warps=8,
        )
        attend_expanded[(triton.cdiv(batch.max_query_len, rows), heads, sequences)](
            q,
            kv,
            expanded,
            batch.block_tables,
            batch.seq_lens,
            batch.cu_seqlens_q,
            out,
            sums,
            stats,
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            batch.block_tables.stride(0),
            begin,
            room,
            int(begin + room >= batch.max_seq_len),
            scale * math.log2(math.e),
            HEADS=heads,
            RANK=rank,
            ROPE=rope,
            NOPE=nope,
            VALUE=value,
            NOPE_WIDTH=_wide(nope),
            ROPE_WIDTH=_wide(rope),
            VALUE_WIDTH=_wide(value),
            PAGE=page,
            BM=rows,
            TILE=tile,
            STAGES=2,
            num_warps=4,
        )
    return out
