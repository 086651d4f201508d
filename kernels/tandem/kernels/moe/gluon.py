"""Experts of at most 64 tokens in Gluon for Hopper: launches.

Roofline: bytes of the chosen experts over the memory's read rate; see bench/results/gemm_h200.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.fp8_gemm import BLOCK
from tandem.kernels.fp8_gemm.rounding import rounded_rows
from tandem.kernels.gemm.gluon import REGISTERS, SHARED_BYTES, narrow
from tandem.kernels.gemm.gluon_kernels import LEAST_SCALES
from tandem.kernels.launch import dependent, generation, sm_count

from . import ALPHA, LIMIT, ExpertActivation, ExpertWeights, Routes
from .gluon_kernels import multiply_experts
from .plan_kernels import list_chosen
from .triton_kernels import add_routes

TILE = 64
"""Outputs of a tile; with a gate half of them."""
_LEAST_SCALES = int(LEAST_SCALES.value)
_MOST_ROUTES = 1024
_MOST_EXPERTS = 512
_BARRIERS = 1 << 10
_ADDED = 1024
_LISTED = 16
"""Experts of a program of ``list_chosen``."""


def takes(x: Tensor, experts: ExpertWeights, routes: Routes) -> bool:
    """Return whether the kernel multiplies: few tokens in 16 bits on Hopper, whole tiles."""
    count, hidden, width = experts.down.shape
    few = routes.ids.numel() <= _MOST_ROUTES
    whole = hidden % TILE == 0 and width % TILE == 0 and count <= _MOST_EXPERTS
    hopper = x.dtype is not torch.float32 and generation(x.device) == 9
    return few and whole and hopper


def expert_feed_forward(
    x: Tensor, experts: ExpertWeights, routes: Routes, activation: ExpertActivation
) -> Tensor:
    """See the wrapper; ``takes`` is true."""
    (tokens, num_chosen), (count, hidden, width) = routes.ids.shape, experts.down.shape
    device, most = x.device, narrow(tokens)
    listed = min(count, tokens * num_chosen)
    chosen = torch.empty(1 + listed, dtype=torch.int32, device=device)
    slots = torch.empty(listed, most, dtype=torch.int32, device=device)
    every = triton.next_power_of_2(max(count, _LISTED))
    list_chosen[(every // _LISTED,)](
        routes.ids,
        chosen,
        slots,
        tokens,
        num_chosen,
        EXPERTS=every,
        ROUTES=triton.next_power_of_2(tokens * num_chosen),
        BM=most,
        **dependent(device),
    )
    inner = torch.empty(listed * most, width, dtype=x.dtype, device=device)
    found = torch.empty(tokens * num_chosen, hidden, device=device)
    halves = activation.halves
    tokens_of = _Tokens(chosen, slots, routes.weights, tokens, num_chosen, most)
    gate_up = _Weight(experts.gate_up, experts.gate_up_scale, experts.gate_up_bias)
    _multiply(x, gate_up, inner, tokens_of, activation, gated=halves == 2, down=False)
    down = _Weight(experts.down, experts.down_scale, experts.down_bias)
    _multiply(inner, down, found, tokens_of, activation, gated=False, down=True)
    out = torch.empty(tokens, hidden, device=device)
    add_routes[(tokens, triton.cdiv(hidden, _ADDED))](
        found, out, hidden, CHOSEN=num_chosen, BLOCK=_ADDED
    )
    return out


class _Weight(NamedTuple):
    values: Tensor
    scale: Tensor | None
    bias: Tensor | None


class _Tokens(NamedTuple):
    chosen: Tensor
    slots: Tensor
    factors: Tensor
    rows: int
    num_chosen: int
    most: int
    """Rows that the kernel is built for."""


def _multiply(
    x: Tensor,
    of: _Weight,
    out: Tensor,
    tokens: _Tokens,
    activation: ExpertActivation,
    *,
    gated: bool,
    down: bool,
) -> None:
    (weight, scale, bias), most = of, tokens.most
    experts, outputs, inner = weight.shape
    step = _step(inner, most, scale is not None)
    bits = 8 if scale is not None else 16
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    box = [TILE // (2 if gated else 1), step]
    values, of_x = x, None
    if scale is not None:
        rounded = rounded_rows(x, by_row=False)
        values, of_x = rounded.codes, _boxes(rounded.scales, step, most)
    row = inner if len(values) == 1 else values.stride(0)
    boxes_of_x = TensorDescriptor(values, [len(x), inner], [row, 1], [most, step], layout)
    multiply_experts[(sm_count(x.device),)](
        TensorDescriptor(weight, [experts * outputs, inner], [inner, 1], box, layout),
        boxes_of_x,
        boxes_of_x if of_x is None else of_x,
        tokens.chosen,
        tokens.slots,
        tokens.factors,
        out if scale is None else scale,
        out if bias is None else bias,
        out,
        tokens.rows,
        out.shape[1],
        tokens.num_chosen,
        outputs // TILE,
        triton.cdiv(inner, step),
        outputs // 2 if gated else 0,
        0 if scale is None else scale.shape[2],
        BM=most,
        BN=TILE,
        BK=step,
        STAGES=_stages(step, most, bits // 8),
        BLOCK=0 if scale is None else BLOCK,
        ACTIVATION=str(activation),
        ALPHA=ALPHA,
        LIMIT=LIMIT,
        GATED=gated,
        DOWN=down,
        BIAS=bias is not None,
        num_warps=4,
        maxnreg=REGISTERS,
        **dependent(x.device),
    )


def _boxes(scales: Tensor, step: int, most: int) -> Any:
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    wide = [step // BLOCK, max(most, _LEAST_SCALES)]
    return TensorDescriptor(scales, list(scales.shape), [scales.stride(0), 1], wide, plain)


def _step(inner: int, most: int, in_blocks: bool) -> int:
    """Return the inputs of a step: the most that divide the inputs, or that are cut little."""
    if in_blocks:
        blocks, longest = triton.cdiv(inner, BLOCK), 4 if most <= 32 else 2
        return next(n for n in (4, 2, 1) if n <= longest and blocks % n == 0) * BLOCK
    return 256 if inner % 256 == 0 or inner > 2048 else 128


def _stages(step: int, most: int, size: int) -> int:
    """Return as many stages as shared memory holds, with the results that are stored."""
    left = SHARED_BYTES - _BARRIERS - TILE * most * 4
    scales = 4 * max(most, _LEAST_SCALES) * triton.cdiv(step, BLOCK)
    found: int = left // ((TILE + most) * step * size + scales)
    return min(12, found)
