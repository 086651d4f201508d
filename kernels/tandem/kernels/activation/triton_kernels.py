"""Jit code of gated activations, a program a piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import let_go


@triton.jit
def silu_and_mul_rows(
    gate_up, out, row_stride, dim,
    BLOCK: tl.constexpr, GELU_TANH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[r] = act(gate_up[r, :dim]) * gate_up[r, dim:]. Grid: (cdiv(dim, BLOCK), rows).

    gate_up [rows, 2 * dim] with a row stride; out [rows, dim] dense. Rounded once. GELU by tanh is
    x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)), otherwise act is SiLU.
    """
    let_go(PDL)
    row = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = col < dim
    gate = tl.load(gate_up + row * row_stride + col, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + dim + col, mask=keep, other=0.0).to(tl.float32)
    inner = gate
    if GELU_TANH:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = gate / (1.0 + tl.exp(-inner)) * up
    tl.store(out + row * dim + col, value.to(out.dtype.element_ty), mask=keep)
