"""Mixture of experts in Triton, for any number of tokens.

Roofline: at few tokens, reading the chosen experts' weights once; at many, operations. Grids depend
on shapes only. Each expert with tokens has whole tiles of rows, so up to one tile per expert is
partly empty.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tandem.kernels.fp8_gemm import BLOCK

from . import (
    ALPHA,
    LIMIT,
    ExpertActivation,
    ExpertOrder,
    ExpertWeights,
    Routes,
    RoutingRule,
    Scoring,
)
from .triton_kernels import add_routes, multiply_down, multiply_gate_up, place_routes, route_rows

FEW_TOKENS = 64
"""Tokens up to which a Hopper GPU streams the chosen experts."""
_SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SIGMOID: 1, Scoring.SOFTMAX_OF_CHOSEN: 2}
_ACTIVATIONS = {
    ExpertActivation.SILU: 0,
    ExpertActivation.CLAMPED: 1,
    ExpertActivation.RELU2: 2,
}
_LEAST_ROWS, _MOST_ROWS = 16, 64
"""Rows of a tile."""
_SORTED = 1024
"""Routes that a program of the sort reads at a time."""
_SUMMED = 1024
"""Columns of a program that adds a token's routes."""


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> Routes:
    """See the wrapper."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, rule.num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, rule.num_chosen, device=logits.device)
    if tokens:
        size = experts // rule.num_groups
        route_rows[(tokens,)](
            logits,
            logits if bias is None else bias,
            ids,
            weights,
            logits.stride(0),
            rule.num_groups,
            size,
            rule.scale,
            CHOSEN=rule.num_chosen,
            CHOSEN_GROUPS=rule.chosen_groups,
            PLACES=triton.next_power_of_2(rule.num_chosen),
            GROUPS=triton.next_power_of_2(rule.num_groups),
            SIZE=triton.next_power_of_2(size),
            SCORING=_SCORINGS[rule.scoring],
            NORMALIZED=rule.normalized,
            GROUPED=rule.num_groups > 1,
            BIAS=bias is not None,
            num_warps=1 if experts <= 256 else 4,
        )
    return Routes(ids, weights)


def sort_by_expert(ids: Tensor, num_experts: int) -> ExpertOrder:
    """See the wrapper; each program places the routes of one expert."""
    count = ids.numel()
    routes = torch.empty(count, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    place_routes[(num_experts,)](
        ids.contiguous(), routes, starts, count, num_experts, BLOCK=_SORTED
    )
    return ExpertOrder(routes, starts)


def expert_feed_forward(
    x: Tensor, experts: ExpertWeights, routes: Routes, activation: ExpertActivation
) -> Tensor:
    """See the wrapper."""
    (tokens, chosen), (count, hidden, width) = routes.ids.shape, experts.down.shape
    total = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
    if not tokens:
        return total
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.is_cuda and tokens <= FEW_TOKENS:
        from . import gluon  # requires Triton's Gluon

        if gluon.takes(x, experts, routes):
            return gluon.expert_feed_forward(x, experts, routes, activation)
    order = sort_by_expert(routes.ids, count)
    rows = tokens * chosen
    height = max(_LEAST_ROWS, min(_MOST_ROWS, triton.next_power_of_2(triton.cdiv(rows, count))))
    tiles = (rows + (height - 1) * min(count, rows)) // height
    columns = 64 if height > _LEAST_ROWS else 32
    shape = {
        "BM": height,
        "BN": columns,
        "BK": BLOCK if experts.gate_up_scale is not None else 64,
        "EXPERTS": triton.next_power_of_2(count),
        "num_warps": 4,
    }
    inner = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    found = torch.empty(rows, hidden, dtype=torch.float32, device=x.device)
    multiply_gate_up[(triton.cdiv(width, columns), tiles)](
        x,
        experts.gate_up,
        _given(experts.gate_up_scale, x),
        _given(experts.gate_up_bias, x),
        order.routes,
        order.starts,
        inner,
        count,
        width,
        hidden,
        x.stride(0),
        CHOSEN=chosen,
        ACTIVATION=_ACTIVATIONS[activation],
        ALPHA=ALPHA,
        LIMIT=LIMIT,
        FP8=experts.gate_up_scale is not None,
        BIAS=experts.gate_up_bias is not None,
        **shape,
    )
    multiply_down[(triton.cdiv(hidden, columns), tiles)](
        inner,
        experts.down,
        _given(experts.down_scale, x),
        _given(experts.down_bias, x),
        order.routes,
        order.starts,
        routes.weights.contiguous(),
        found,
        count,
        hidden,
        width,
        FP8=experts.down_scale is not None,
        BIAS=experts.down_bias is not None,
        **shape,
    )
    add_routes[(tokens, triton.cdiv(hidden, _SUMMED))](
        found, total, hidden, CHOSEN=chosen, BLOCK=_SUMMED
    )
    return total


def _given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or one that the kernel does not read."""
    return other if tensor is None else tensor
