"""Mixture of experts: choice of each token's experts, and their feed-forward networks.

Routes are sorted by expert, so that a kernel multiplies the rows of an expert together. The sorted
order is that of the tokens within an expert, and the sums of a token are in the order of its
routes. Results therefore do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.fp8_gemm import BLOCK
from tandem.kernels.registry import Backend, Op

ALPHA = 1.702
"""Factor in the sigmoid of CLAMPED."""
LIMIT = 7.0
"""Bound of gate and up of CLAMPED."""


class Scoring(StrEnum):
    """Scores of a token's experts, which are also the weights of the chosen ones."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """The logits decide, and the softmax is over the chosen experts."""


class ExpertActivation(StrEnum):
    """Activation between the two products of an expert."""

    SILU = "silu"
    """silu(gate) * up."""
    CLAMPED = "clamped"
    """(up + 1) * gate * sigmoid(ALPHA * gate), of up within LIMIT and gate below it."""
    RELU2 = "relu2"
    """max(up, 0) squared, without a gate."""

    @property
    def halves(self) -> int:
        """Return how many numbers of the first product make one of its result."""
        return 1 if self is ExpertActivation.RELU2 else 2


class RoutingRule(NamedTuple):
    """Choice of a token's experts."""

    num_chosen: int
    scoring: Scoring
    normalized: bool = False
    """Whether the weights of a token are divided by their sum."""
    num_groups: int = 1
    """Groups of consecutive experts. The best groups are chosen first, by their best score, or with
    a bias by the sum of the best two."""
    chosen_groups: int = 1
    scale: float = 1.0
    """Factor of all weights."""


class Routes(NamedTuple):
    """Chosen experts of tokens, the best first."""

    ids: Tensor
    """int32 [tokens, chosen]."""
    weights: Tensor
    """float32 [tokens, chosen]."""


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer, dense: of x's type, or e4m3 with float32 scales.

    A scale is of BLOCK by BLOCK weights. Gate and up have their own blocks, the last ones cut
    short.
    """

    gate_up: Tensor
    """[experts, 2 * width, hidden], the gate's rows first; [experts, width, hidden] without a
    gate."""
    down: Tensor
    """[experts, hidden, width]."""
    gate_up_scale: Tensor | None = None
    """[experts, 2 * blocks of width, blocks of hidden], or without a gate half as many."""
    down_scale: Tensor | None = None
    """[experts, blocks of hidden, blocks of width]."""
    gate_up_bias: Tensor | None = None
    """[experts, 2 * width], of x's type."""
    down_bias: Tensor | None = None
    """[experts, hidden], of x's type."""


class ExpertOrder(NamedTuple):
    """Routes by expert, then by token. Route ``token * chosen + place`` is that of a token's place
    in ``Routes``."""

    routes: Tensor
    """int32 [tokens * chosen]."""
    starts: Tensor
    """int32 [experts + 1]: the routes of an expert begin here, and end where the next one's
    begin."""


def _where(name: str) -> dict[Backend, str]:
    here = "tandem.kernels.moe"
    return {Backend.TORCH: f"{here}.reference:{name}", Backend.TRITON: f"{here}.triton:{name}"}


Route = Callable[[Tensor, RoutingRule, Tensor | None], Routes]
SortByExpert = Callable[[Tensor, int], ExpertOrder]
ExpertFeedForward = Callable[[Tensor, ExpertWeights, Routes, ExpertActivation], Tensor]
ROUTE: Op[Route] = Op("moe.route", _where("route"))
SORT_BY_EXPERT: Op[SortByExpert] = Op("moe.sort_by_expert", _where("sort_by_expert"))
EXPERT_FEED_FORWARD: Op[ExpertFeedForward] = Op(
    "moe.expert_feed_forward", _where("expert_feed_forward"), product=True
)


def route(
    logits: Tensor,
    rule: RoutingRule,
    bias: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Routes:
    """Return the experts of each token by logits float32 [tokens, experts].

    Of equal scores the lower expert is first. ``bias`` float32 [experts] is added to the scores
    that choose, not to the weights (DeepSeek-V3, 2024).
    """
    checks.shape("logits", logits, None, None)
    checks.kind("logits", logits, torch.float32)
    checks.dense_last("logits", logits)
    experts, groups = logits.shape[1], rule.num_groups
    if bias is not None:
        checks.shape("bias", bias, experts)
        checks.same("bias", bias, "logits", logits)
    if experts % groups or not 1 <= rule.chosen_groups <= groups:
        raise BadTensor(f"logits have {experts} experts, expected groups as in {rule}")
    if not 1 <= rule.num_chosen <= experts // groups * rule.chosen_groups:
        raise BadTensor(f"logits have {experts} experts, too few for {rule}")
    return ROUTE.on(logits.device, backend)(logits, rule, bias)


def sort_by_expert(ids: Tensor, num_experts: int, *, backend: Backend | None = None) -> ExpertOrder:
    """Return the order of routes with expert ids int32 [tokens, chosen], all below
    ``num_experts``."""
    checks.shape("ids", ids, None, None)
    checks.kind("ids", ids, torch.int32)
    return SORT_BY_EXPERT.on(ids.device, backend)(ids, num_experts)


def expert_feed_forward(
    x: Tensor,
    experts: ExpertWeights,
    routes: Routes,
    activation: ExpertActivation,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Return the sum over a token's routes of weight * (down(activation(gate_up(x))) + bias).

    x is [tokens, hidden] in float32, bfloat16 or float16. The result is float32 [tokens, hidden].
    Sums are float32; the activation is rounded to x's type.
    """
    checks.shape("x", x, None, None)
    checks.kind("x", x, torch.float32, torch.bfloat16, torch.float16)
    checks.shape("ids", routes.ids, x.shape[0], None)
    checks.kind("ids", routes.ids, torch.int32)
    checks.shape("weights", routes.weights, *routes.ids.shape)
    checks.kind("weights", routes.weights, torch.float32)
    _check_weights(x, experts, activation)
    return EXPERT_FEED_FORWARD.on(x.device, backend)(x, experts, routes, activation)


def _check_weights(x: Tensor, experts: ExpertWeights, activation: ExpertActivation) -> None:
    count, hidden, width = experts.down.shape
    rows = activation.halves * width
    checks.shape("gate_up", experts.gate_up, count, rows, x.shape[1])
    checks.shape("down", experts.down, count, x.shape[1], None)
    wide, deep = -(-hidden // BLOCK), -(-width // BLOCK)
    for name, weight, scale, blocks in (
        ("gate_up", experts.gate_up, experts.gate_up_scale, (activation.halves * deep, wide)),
        ("down", experts.down, experts.down_scale, (wide, deep)),
    ):
        if not weight.is_contiguous():
            raise BadTensor(f"{name} has strides {weight.stride()}, expected dense")
        if scale is None:
            checks.same(name, weight, "x", x)
            continue
        checks.kind(name, weight, torch.float8_e4m3fn)
        checks.shape(f"{name}_scale", scale, count, *blocks)
        checks.kind(f"{name}_scale", scale, torch.float32)
        if not scale.is_contiguous():
            raise BadTensor(f"{name}_scale has strides {scale.stride()}, expected dense")
    for name, bias, extent in (
        ("gate_up_bias", experts.gate_up_bias, rows),
        ("down_bias", experts.down_bias, hidden),
    ):
        if bias is not None:
            checks.shape(name, bias, count, extent)
            checks.same(name, bias, "x", x)
            checks.dense_last(name, bias)
