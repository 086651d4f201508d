"""Mixture of experts in plain torch: a loop over the experts that have tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from tandem.kernels.fp8_gemm import fp8_linear
from tandem.kernels.gemm import linear
from tandem.kernels.registry import Backend

from . import (
    ALPHA,
    LIMIT,
    SORT_BY_EXPERT,
    ExpertActivation,
    ExpertOrder,
    ExpertWeights,
    Routes,
    RoutingRule,
    Scoring,
)


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> Routes:
    """See the wrapper."""
    scores = logits
    if rule.scoring is Scoring.SIGMOID:
        scores = logits.sigmoid()
    elif rule.scoring is Scoring.SOFTMAX:
        scores = logits.softmax(-1)
    ranked = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        ranked = _of_best_groups(ranked, rule, best=1 if bias is None else 2)
    ids = _best(ranked, rule.num_chosen)
    weights = scores.gather(1, ids)
    if rule.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    if rule.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routes(ids.int(), weights * rule.scale)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the columns of the largest scores; of equal ones the first, unlike ``topk``."""
    found: Tensor = scores.sort(dim=-1, descending=True, stable=True).indices
    return found[:, :count]


def _of_best_groups(ranked: Tensor, rule: RoutingRule, best: int) -> Tensor:
    """Return the scores with those of all but the best groups at -inf. A group is scored by the sum
    of its ``best`` largest."""
    groups = ranked.view(len(ranked), rule.num_groups, ranked.shape[1] // rule.num_groups)
    chosen = _best(groups.topk(min(best, groups.shape[2]))[0].sum(-1), rule.chosen_groups)
    kept = torch.zeros_like(groups[:, :, 0], dtype=torch.bool).scatter_(1, chosen, True)
    return groups.masked_fill(~kept[:, :, None], -math.inf).flatten(1)


def sort_by_expert(ids: Tensor, num_experts: int) -> ExpertOrder:
    """See the wrapper."""
    found = ids.flatten().sort(stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
    starts = torch.searchsorted(found.values, experts, out_int32=True)
    return ExpertOrder(found.indices.int(), starts)


def expert_feed_forward(
    x: Tensor, experts: ExpertWeights, routes: Routes, activation: ExpertActivation
) -> Tensor:
    """See the wrapper."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return _added(of_all_tokens(x, experts, routes.ids, activation), routes.weights)

    def of_expert(rows: Tensor, expert: int) -> Tensor:
        return _of_expert(rows, experts, expert, activation)

    return sum_of_experts(x, routes, len(experts.down), of_expert)


def sum_of_experts(
    x: Tensor, routes: Routes, num_experts: int, of_expert: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return the wrapper's sum, float32 [tokens, hidden].

    ``of_expert`` returns float32 [rows, hidden] of rows of x; it is called for experts with tokens.
    """
    tokens, chosen = routes.ids.shape
    order = SORT_BY_EXPERT.load(Backend.TORCH)(routes.ids, num_experts)
    starts, places = order.starts.tolist(), order.routes.long()
    found = torch.empty(tokens * chosen, x.shape[1], dtype=torch.float32, device=x.device)
    for expert, (first, end) in enumerate(pairwise(starts)):
        if first < end:
            rows = places[first:end]
            found[rows] = of_expert(x[rows // chosen], expert)
    return _added(found.view(tokens, chosen, x.shape[1]), routes.weights)


def _added(found: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum [tokens, hidden] of [tokens, chosen, hidden], in the order of
    routes."""
    weighted = found * weights[..., None]
    total = weighted[:, 0]
    for place in range(1, weights.shape[1]):
        total = total + weighted[:, place]
    return total


def of_all_tokens(
    x: Tensor, experts: ExpertWeights, ids: Tensor, activation: ExpertActivation
) -> Tensor:
    """Return float32 [tokens, chosen, hidden], of all experts for all tokens: a CUDA graph cannot
    hold numbers of tokens that are read on the host."""
    found = x.new_empty(*ids.shape, x.shape[1], dtype=torch.float32)
    for expert in range(len(experts.down)):
        each = _of_expert(x, experts, expert, activation)
        found = torch.where((ids == expert)[..., None], each[:, None], found)
    return found


def _of_expert(
    x: Tensor, experts: ExpertWeights, expert: int, activation: ExpertActivation
) -> Tensor:
    """Return float32 [rows, hidden] of one expert."""
    inner = activated(_gate_up(x, experts, expert, activation), activation)
    return _down(inner.to(x.dtype), experts, expert)


def activated(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """Return the activation [rows, width] of float32 [rows, halves * width]."""
    if activation is ExpertActivation.RELU2:
        return relu(gate_up).square()
    gate, up = gate_up.chunk(2, -1)
    if activation is ExpertActivation.SILU:
        return silu(gate) * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * (gate * ALPHA).sigmoid())


def _gate_up(
    x: Tensor, experts: ExpertWeights, expert: int, activation: ExpertActivation
) -> Tensor:
    """Return the first product of one expert, float32 [rows, halves * width]."""
    weight, bias = experts.gate_up[expert], _of(experts.gate_up_bias, expert)
    if experts.gate_up_scale is None:
        return _product(x, weight, None, bias)
    parts = weight.chunk(activation.halves), experts.gate_up_scale[expert].chunk(activation.halves)
    found = torch.cat([_product(x, *each, None) for each in zip(*parts, strict=True)], 1)
    return found if bias is None else found.add_(bias)


def _down(inner: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    scale, bias = _of(experts.down_scale, expert), _of(experts.down_bias, expert)
    return _product(inner, experts.down[expert], scale, bias)


def _of(tensor: Tensor | None, expert: int) -> Tensor | None:
    return None if tensor is None else tensor[expert]


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    backend, dtype = Backend.TORCH, torch.float32
    if scale is None:
        return linear(x, weight, bias, out_dtype=dtype, backend=backend)
    return fp8_linear(x, weight, scale, bias, out_dtype=dtype, backend=backend)
