"""Products of at most 64 rounded rows in Gluon for Hopper, by the kernel that streams weights.

Roofline: one byte a weight over the memory's read rate; see bench/results/gemm_h200.md.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.gemm.form import Form
from tandem.kernels.gemm.gluon import REGISTERS, SHARED_BYTES, narrow
from tandem.kernels.gemm.gluon_kernels import LEAST_SCALES, multiply_stream
from tandem.kernels.gemm.triton import PARTIAL_BYTES, room
from tandem.kernels.launch import sm_count

from . import BLOCK
from .rounding import RoundedRows

TILE = 64
"""Outputs of a program."""
_LEAST_SCALES = int(LEAST_SCALES.value)
_MANY, _LONG = 32, 8192
"""Rows and inner size above which half as many programs are too slow."""
_MOST_STAGES = 12
_BARRIERS = 1 << 10


def form_of(outputs: int, inner: int, rows: int, programs: int) -> Form:
    """Return the form with the longest steps that fit, and the fewest parts that occupy the device.

    Measured on an H200: copies and products have a latency of some 0.3 us a step.
    """
    tiles, blocks = outputs // TILE, inner // BLOCK
    enough = programs * 2 // 3 if rows > _MANY and inner > _LONG else programs // 3
    splits = [n for n in (1, 2, 4, 8) if blocks % n == 0 and _has_room(n, outputs, rows)]
    split = next((n for n in splits if tiles * n >= enough), splits[-1])
    most = 512 if rows <= _MANY else 256
    step = next(n for n in (512, 256, 128) if n <= most and blocks // split * BLOCK % n == 0)
    return Form(TILE, step, split, _stages(step, rows), stream=True)


def _has_room(split: int, outputs: int, rows: int) -> bool:
    return split == 1 or split * narrow(rows) * outputs * 4 <= PARTIAL_BYTES


def _stages(step: int, rows: int) -> int:
    """Return as many stages as shared memory holds."""
    most = narrow(rows)
    left = SHARED_BYTES - _BARRIERS - TILE * most * 4
    scales = 4 * max(most, _LEAST_SCALES) * step // BLOCK
    return min(_MOST_STAGES, left // ((TILE + most) * step + scales))


def multiply(
    rows: RoundedRows,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> None:
    """Fill out [rows, outputs], or add to ``residual``, which is then ``out``. Weights are in whole
    blocks, and so is each half of gated ones."""
    count, outputs = out.shape
    inner = weight.shape[1]
    programs = sm_count(out.device)
    form = form_of(weight.shape[0], inner, count, programs)
    if gated and form.split > 1:
        form = Form(TILE, form.inner, 1, form.stages, stream=True)
    pieces = weight.shape[0] // TILE * form.split
    partials, counters = room(out.device)
    codes = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    box = [TILE // (2 if gated else 1), form.inner]
    most = narrow(count)
    wide = [form.inner // BLOCK, max(most, _LEAST_SCALES)]
    of_x = rows.scales
    multiply_stream[(-(-pieces // -(-pieces // programs)),)](
        TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], box, codes),
        TensorDescriptor(rows.codes, [count, inner], [inner, 1], [most, form.inner], codes),
        TensorDescriptor(of_x, list(of_x.shape), [of_x.stride(0), 1], wide, plain),
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        partials,
        counters,
        of_x,
        scale,
        count,
        outputs,
        0 if residual is None else residual.stride(0),
        inner // form.inner // form.split,
        pieces,
        scale.stride(0),
        BM=most,
        BN=TILE,
        BK=form.inner,
        GROUP=1,
        SPLIT=form.split,
        STAGES=form.stages,
        BLOCK=BLOCK,
        CHANNEL=scale.dim() == 1,
        GATED=gated,
        ADD=residual is not None,
        BIAS=bias is not None,
        PDL=True,
        launch_pdl=True,
        num_warps=4,
        maxnreg=REGISTERS,
    )
