"""Products with few rows in Gluon for Hopper: descriptors, the ring's size and the launch.

Chosen by the tables; partial sums and counters are those of triton.py.

Roofline: bytes of the weight over the memory's read rate; see bench/results/gemm_h200.md.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.launch import dependent, generation, sm_count

from .form import Form
from .gluon_kernels import multiply_stream

SHARED_BYTES = 227 << 10
"""Shared bytes of a multiprocessor, for one program."""
REGISTERS = 128
"""Registers of a thread, of eight warps: half of the file is left to simultaneous kernels."""
_BARRIERS = 1 << 10


def ring_fits(form: Form, rows: int) -> bool:
    """Return whether the ring and the sums to be stored fit into shared memory."""
    most = narrow(rows)
    ring = form.stages * (form.group * form.outputs + most) * form.inner * 2
    return ring + form.outputs * most * 2 + _BARRIERS <= SHARED_BYTES


def narrow(rows: int) -> int:
    """Return the rows of x that the kernel is built for."""
    return max(8, 1 << (rows - 1).bit_length())


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether the device is Hopper, and the copy engine can address the rows."""
    return generation(x.device) == 9 and all(
        each.data_ptr() % 16 == 0 and (each.shape[0] == 1 or each.stride(0) % 8 == 0)
        for each in (x, weight)
    )


def launch(
    x: Tensor,
    weight: Tensor,
    form: Form,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    room: tuple[Tensor, Tensor],
    *,
    gated: bool,
) -> None:
    """Fill `out` [rows, outputs], or add to `residual`, which is then `out`."""
    (rows, inner), outputs = x.shape, out.shape[1]
    groups = triton.cdiv(outputs * (2 if gated else 1), form.outputs * form.group)
    pieces = groups * form.split
    grid = triton.cdiv(pieces, triton.cdiv(pieces, sm_count(x.device)))
    partials, counters = room
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    box = [form.outputs // (2 if gated else 1), form.inner]
    most = narrow(rows)
    row = inner if rows == 1 else x.stride(0)
    rows_of_x = TensorDescriptor(x, [rows, inner], [row, 1], [most, form.inner], layout)
    multiply_stream[(grid,)](
        TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], box, layout),
        rows_of_x,
        rows_of_x,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        partials,
        counters,
        x,
        x,
        rows,
        outputs,
        0 if residual is None else residual.stride(0),
        inner // form.inner // form.split,
        pieces,
        0,
        BM=most,
        BN=form.outputs,
        BK=form.inner,
        GROUP=form.group,
        SPLIT=form.split,
        STAGES=form.stages,
        BLOCK=0,
        CHANNEL=False,
        GATED=gated,
        ADD=residual is not None,
        BIAS=bias is not None,
        num_warps=4,
        maxnreg=REGISTERS,
        **dependent(x.device),
    )
