"""Mixture of experts in Triton against plain torch."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, NEEDS, size
from tests.kernels.moe_cases import RULES, biased, experts_of, routes_of

from tandem.kernels import Backend
from tandem.kernels.moe import (
    ExpertActivation,
    ExpertWeights,
    Routes,
    expert_feed_forward,
    route,
    sort_by_expert,
)

pytestmark = NEEDS


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tokens", [0, size(300, 9)])
def test_routes_are_those_of_the_reference(name, tokens):
    """Of equal scores the lower expert is first, also of a group."""
    draw = torch.Generator().manual_seed(tokens)
    experts = 36 if RULES[name].num_groups == 6 else 40
    logits = torch.randn(tokens, 2 * experts, generator=draw)[:, :experts]
    logits = (logits * 4).round().div(4).to(DEVICE)
    bias = biased(name, experts, draw)
    bias = None if bias is None else bias.to(DEVICE)
    got = route(logits, RULES[name], bias, backend=Backend.TRITON)
    want = route(logits, RULES[name], bias, backend=Backend.TORCH)
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.weights, want.weights)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
def test_rows_without_numbers_have_experts():
    """The rows of padding hold anything."""
    logits = torch.full((3, 6), float("nan"), device=DEVICE)
    for rule in RULES.values():
        if rule.num_chosen <= 6 and rule.num_groups == 1:
            ids = route(logits, rule, backend=Backend.TRITON).ids
            assert ((ids >= 0) & (ids < 6)).all()


@pytest.mark.parametrize(("tokens", "chosen"), [(0, 2), (1, 1), (size(3000, 700), 4)])
def test_routes_are_in_the_order_of_the_reference(tokens, chosen):
    ids = routes_of(tokens, 17, chosen).ids.to(DEVICE)
    got = sort_by_expert(ids, 17, backend=Backend.TRITON)
    want = sort_by_expert(ids, 17, backend=Backend.TORCH)
    assert torch.equal(got.starts, want.starts)
    assert torch.equal(got.routes, want.routes)


def moved(experts: ExpertWeights) -> ExpertWeights:
    there = {name: each.to(DEVICE) for name, each in experts._asdict().items() if each is not None}
    return ExpertWeights(**there)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "count", "width", "hidden", "fp8", "biases", "activation"),
    [
        (0, 5, 24, 40, False, False, ExpertActivation.SILU),
        (1, 5, 24, 40, False, True, ExpertActivation.CLAMPED),
        (size(700, 40), 4, size(768, 40), size(2048, 72), False, True, ExpertActivation.SILU),
        (size(64, 9), 4, size(256, 40), size(512, 72), False, False, ExpertActivation.RELU2),
        (size(64, 3), 3, size(200, 136), 144, True, False, ExpertActivation.SILU),
        (size(700, 18), 2, size(768, 40), size(2048, 72), True, True, ExpertActivation.CLAMPED),
    ],
)
def test_sums_are_those_of_the_reference(
    tokens: int,
    count: int,
    width: int,
    hidden: int,
    fp8: bool,
    biases: bool,
    activation: ExpertActivation,
    dtype: torch.dtype,
) -> None:
    """Experts with no tokens, with one, and with several tiles; blocks that are cut short."""
    experts = moved(experts_of(count, width, hidden, activation, dtype, fp8=fp8, biases=biases))
    draw = torch.Generator().manual_seed(tokens + 1)
    x = torch.randn(tokens, 2 * hidden, generator=draw)[:, :hidden].to(dtype).to(DEVICE)
    routes = Routes(*(each.to(DEVICE) for each in routes_of(tokens, count, 2)))
    want = expert_feed_forward(x, experts, routes, activation, backend=Backend.TORCH)
    got = expert_feed_forward(x, experts, routes, activation, backend=Backend.TRITON)
    close = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=close, atol=close)
