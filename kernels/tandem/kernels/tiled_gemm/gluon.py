"""Products of at most 64 rows with tiles of codes in Gluon for Hopper: launches.

Roofline: bytes of codes and scales over the memory's read rate; see bench/results/gemm_h200.md.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.gemm.gluon import REGISTERS, SHARED_BYTES, narrow
from tandem.kernels.gemm.triton import room
from tandem.kernels.launch import dependent, sm_count

from .gluon_kernels import multiply_tiles
from .tiles import BLOCK, TILE, WORDS, TiledWeight

_MOST_STAGES = 12
_BARRIERS = 1 << 10


class Form(NamedTuple):
    """Parameters of the kernel."""

    blocks: int
    """Blocks of inputs in a step."""
    split: int
    """Parts of the inputs."""
    stages: int


def form_of(weight: TiledWeight, rows: int) -> Form:
    """Return the form of a shape."""
    tiles, blocks = weight.outputs // TILE, weight.inner // BLOCK
    programs = sm_count(weight.words.device)
    splits = [n for n in (1, 2, 4, 8) if blocks % n == 0]
    split = next((n for n in splits if tiles * n >= programs // 3), splits[-1])
    most = max(1, 4 // weight.groups) if rows <= 32 else 2
    step = next(n for n in (4, 2, 1) if n <= most and blocks // split % n == 0)
    return Form(step, split, stages_of(step, rows))


def stages_of(blocks: int, rows: int) -> int:
    """Return the stages of which two programs fit in shared memory."""
    most = narrow(rows)
    left = SHARED_BYTES // 2 - _BARRIERS - TILE * most * 4
    return max(2, min(_MOST_STAGES, left // (blocks * (TILE * WORDS + most * BLOCK) * 2)))


def multiply(
    x: Tensor,
    weight: TiledWeight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    form: Form | None = None,
) -> None:
    """Fill out [rows, outputs], or add to ``residual``, which is then ``out``."""
    rows = x.shape[0]
    form = form or form_of(weight, rows)
    pieces = weight.outputs // TILE * form.split
    programs = 2 * sm_count(x.device)
    partials, counters = room(x.device)
    words = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    box = [form.blocks * TILE, WORDS]
    most = narrow(rows)
    row = weight.inner if rows == 1 else x.stride(0)
    wide = [most, form.blocks * BLOCK]
    multiply_tiles[(-(-pieces // -(-pieces // programs)),)](
        TensorDescriptor(weight.words, list(weight.words.shape), [WORDS, 1], box, words),
        TensorDescriptor(x, [rows, weight.inner], [row, 1], wide, plain),
        weight.scales,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        partials,
        counters,
        rows,
        weight.outputs,
        0 if residual is None else residual.stride(0),
        weight.inner // BLOCK // form.blocks // form.split,
        pieces,
        BM=most,
        NB=form.blocks,
        GROUPS=weight.groups,
        SPLIT=form.split,
        STAGES=form.stages,
        ADD=residual is not None,
        BIAS=bias is not None,
        num_warps=4,
        maxnreg=REGISTERS,
        **dependent(x.device),
    )
