"""Routing rules and experts for tests of the op, on any device."""

from __future__ import annotations

import torch
from tests.engine_run.fp8_models import quantised
from torch import Tensor

from tandem.kernels.moe import ExpertActivation, ExpertWeights, Routes, RoutingRule, Scoring

RULES = {
    "softmax": RoutingRule(4, Scoring.SOFTMAX),
    "normalized": RoutingRule(8, Scoring.SOFTMAX, normalized=True),
    "softmax of chosen": RoutingRule(3, Scoring.SOFTMAX_OF_CHOSEN),
    "groups": RoutingRule(4, Scoring.SOFTMAX, num_groups=4, chosen_groups=2, scale=16.0),
    "biased groups": RoutingRule(
        5, Scoring.SIGMOID, normalized=True, num_groups=6, chosen_groups=3, scale=2.5
    ),
    "biased": RoutingRule(4, Scoring.SIGMOID, normalized=True),
    "one": RoutingRule(1, Scoring.SIGMOID),
}


def biased(name: str, experts: int, draw: torch.Generator) -> Tensor | None:
    return torch.randn(experts, generator=draw) / 4 if "biased" in name else None


def experts_of(
    count: int,
    width: int,
    hidden: int,
    activation: ExpertActivation,
    dtype: torch.dtype,
    *,
    fp8: bool = False,
    biases: bool = False,
) -> ExpertWeights:
    draw = torch.Generator().manual_seed(count + width + hidden)
    halves = activation.halves
    gate_up = torch.randn(count, halves * width, hidden, generator=draw) / hidden**0.5
    down = torch.randn(count, hidden, width, generator=draw) / width**0.5
    given: list[Tensor | None] = [None, None]
    if biases:
        given = [
            torch.randn(count, extent, generator=draw).to(dtype)
            for extent in (halves * width, hidden)
        ]
    if not fp8:
        return ExpertWeights(gate_up.to(dtype), down.to(dtype), None, None, *given)
    parts = [[quantised(half) for half in each.chunk(halves)] for each in gate_up]
    inner, scales = (
        torch.stack([torch.cat([pair[at].float() for pair in each]) for each in parts])
        for at in (0, 1)
    )
    found = [quantised(each) for each in down]
    outer, down_scales = (torch.stack([pair[at].float() for pair in found]) for at in (0, 1))
    codes = torch.float8_e4m3fn
    return ExpertWeights(inner.to(codes), outer.to(codes), scales, down_scales, *given)


def routes_of(tokens: int, count: int, chosen: int) -> Routes:
    """Random routes; experts from the middle on have no tokens, if there are enough others."""
    draw = torch.Generator().manual_seed(tokens)
    most = max(chosen, count // 2)
    ids = torch.empty(tokens, chosen, dtype=torch.int32)
    for row in ids:
        row.copy_(torch.randperm(most, generator=draw)[:chosen])
    return Routes(ids, torch.rand(tokens, chosen, generator=draw))
