"""Routing and experts on a CPU against transformers' modules, and what the wrappers refuse."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from tests.engine_run.fp8_models import scaled
from tests.kernels.moe_cases import experts_of, routes_of
from torch import Tensor

from tandem.kernels.errors import BadTensor
from tandem.kernels.moe import (
    ExpertActivation,
    ExpertWeights,
    Routes,
    RoutingRule,
    Scoring,
    expert_feed_forward,
    route,
    sort_by_expert,
)
from tandem.kernels.moe.reference import of_all_tokens

EXPERTS = 24
GROUPS = {"n_group": 4, "topk_group": 2}
ROUTERS: dict[str, tuple[str, str, dict[str, Any], RoutingRule]] = {
    "qwen3": ("qwen3_moe", "Qwen3Moe", {}, RoutingRule(5, Scoring.SOFTMAX)),
    "qwen3 normalized": (
        "qwen3_moe",
        "Qwen3Moe",
        {"norm_topk_prob": True},
        RoutingRule(5, Scoring.SOFTMAX, normalized=True),
    ),
    "mixtral": ("mixtral", "Mixtral", {}, RoutingRule(5, Scoring.SOFTMAX, normalized=True)),
    "gpt-oss": ("gpt_oss", "GptOss", {}, RoutingRule(5, Scoring.SOFTMAX_OF_CHOSEN)),
    "deepseek v2": (
        "deepseek_v2",
        "DeepseekV2",
        {
            **GROUPS,
            "n_routed_experts": EXPERTS,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        },
        RoutingRule(5, Scoring.SOFTMAX, num_groups=4, chosen_groups=2, scale=16.0),
    ),
    "deepseek v3": (
        "deepseek_v3",
        "DeepseekV3",
        {**GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        RoutingRule(5, Scoring.SIGMOID, normalized=True, num_groups=4, chosen_groups=2, scale=2.5),
    ),
}
"""Module, prefix of classes, settings, and the rule that they stand for."""


def modeling(folder: str) -> Any:
    """Return transformers' module of a family, which takes seconds to import."""
    return import_module(f"transformers.models.{folder}.modeling_{folder}")


def config_of(prefix: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, f"{prefix}Config")(
        hidden_size=EXPERTS,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_local_experts=EXPERTS,
        num_experts_per_tok=5,
        **settings,
    )


def by_expert(ids: Tensor, weights: Tensor) -> Tensor:
    """float32 [tokens, experts] of the weights, as transformers' order of experts is free."""
    return torch.zeros(len(ids), EXPERTS).scatter_(1, ids.long(), weights.float())


@pytest.mark.parametrize("name", ROUTERS)
def test_routes_are_those_of_transformers(name: str) -> None:
    folder, prefix, settings, rule = ROUTERS[name]
    kind = "Topk" if prefix.startswith("Deepseek") else "TopK"
    draw = torch.Generator().manual_seed(5)
    router = getattr(modeling(folder), f"{prefix}{kind}Router")(config_of(prefix, **settings))
    logits, bias = torch.randn(200, EXPERTS, generator=draw), None
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
        if hasattr(router, "bias"):
            router.bias.zero_()
        if hasattr(router, "e_score_correction_bias"):
            bias = torch.randn(EXPERTS, generator=draw) / 4
            router.e_score_correction_bias.copy_(bias)
        _, weights, ids = router(logits)
    got = route(logits, rule, bias)
    torch.testing.assert_close(by_expert(*got), by_expert(ids, weights))
    if bias is None:
        assert (got.weights.diff(dim=1) <= 0).all()


def test_of_equal_scores_the_lower_expert_is_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0], [0.0] * 6])
    rule = RoutingRule(4, Scoring.SOFTMAX)
    assert route(logits, rule).ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    grouped = RoutingRule(2, Scoring.SOFTMAX, num_groups=3, chosen_groups=1)
    assert route(logits, grouped).ids.tolist() == [[1, 0], [0, 1]]


def test_routes_are_sorted_by_expert_then_by_token() -> None:
    ids = torch.tensor([[3, 1], [1, 0], [3, 4]], dtype=torch.int32)
    order = sort_by_expert(ids, 6)
    assert order.routes.tolist() == [3, 1, 2, 0, 4, 5]
    assert order.starts.tolist() == [0, 1, 3, 3, 5, 6, 6]


@pytest.mark.parametrize(
    ("folder", "prefix", "activation"),
    [
        ("mixtral", "Mixtral", ExpertActivation.SILU),
        ("gpt_oss", "GptOss", ExpertActivation.CLAMPED),
    ],
)
def test_sums_are_those_of_transformers(
    folder: str, prefix: str, activation: ExpertActivation
) -> None:
    """Large numbers reach the bounds of CLAMPED."""
    width, tokens = 40, 30
    clamped = activation is ExpertActivation.CLAMPED
    weights = experts_of(EXPERTS, width, EXPERTS, activation, torch.float32, biases=clamped)
    routes = routes_of(tokens, EXPERTS, 5)
    x = 8 * torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(1))
    config = config_of(prefix, intermediate_size=width, experts_implementation="eager")
    module = getattr(modeling(folder), f"{prefix}Experts")(config)
    with torch.no_grad():
        if clamped:
            assert weights.gate_up_bias is not None
            assert weights.down_bias is not None
            turns = torch.arange(2 * width).view(2, width).t().flatten()
            module.gate_up_proj.copy_(weights.gate_up[:, turns].transpose(1, 2))
            module.gate_up_proj_bias.copy_(weights.gate_up_bias[:, turns])
            module.down_proj.copy_(weights.down.transpose(1, 2))
            module.down_proj_bias.copy_(weights.down_bias)
        else:
            module.gate_up_proj.copy_(weights.gate_up)
            module.down_proj.copy_(weights.down)
        want = module(x, routes.ids.long(), routes.weights)
    got = expert_feed_forward(x, weights, routes, activation)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_squared_relu_has_no_gate() -> None:
    weights = experts_of(4, 12, 20, ExpertActivation.RELU2, torch.float32)
    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(2))
    routes = Routes(torch.full((6, 1), 2, dtype=torch.int32), torch.full((6, 1), 0.5))
    want = 0.5 * (x @ weights.gate_up[2].t()).relu().square() @ weights.down[2].t()
    got = expert_feed_forward(x, weights, routes, ExpertActivation.RELU2)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("width", [40, 256])
def test_codes_stand_for_scaled_weights(width: int) -> None:
    """Gate and up have their own blocks, which may be cut short."""
    weights = experts_of(3, width, 144, ExpertActivation.SILU, torch.float32, fp8=True)
    assert weights.gate_up_scale is not None
    assert weights.down_scale is not None
    both = [
        [scaled(*half) for half in zip(codes.chunk(2), scale.chunk(2), strict=True)]
        for codes, scale in zip(weights.gate_up, weights.gate_up_scale, strict=True)
    ]
    down = [scaled(*each) for each in zip(weights.down, weights.down_scale, strict=True)]
    plain = ExpertWeights(torch.stack([torch.cat(each) for each in both]), torch.stack(down))
    x = torch.randn(9, 144, generator=torch.Generator().manual_seed(3))
    routes = routes_of(9, 3, 2)
    got, want = (
        expert_feed_forward(x, each, routes, ExpertActivation.SILU) for each in (weights, plain)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_all_experts_for_all_tokens_are_the_chosen_ones() -> None:
    """Plain torch in a CUDA graph."""
    weights = experts_of(6, 12, 16, ExpertActivation.SILU, torch.float32)
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(4))
    routes = routes_of(9, 6, 2)
    all_tokens = of_all_tokens(x, weights, routes.ids, ExpertActivation.SILU)
    want = (all_tokens * routes.weights[..., None]).sum(1)
    torch.testing.assert_close(expert_feed_forward(x, weights, routes, ExpertActivation.SILU), want)


Change = Callable[[Tensor, ExpertWeights, Routes], tuple[Tensor, ExpertWeights, Routes]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, w, r: (x[:, :8], w, r), "gate_up has shape"),
        (lambda x, w, r: (x, w._replace(down=w.down[:2]), r), "expected .2, 24, 16"),
        (lambda x, w, r: (x, w._replace(down=w.down.half()), r), "down is torch.float16"),
        (lambda x, w, r: (x, w, r._replace(ids=r.ids.long())), "ids is torch.int64"),
        (lambda x, w, r: (x, w, r._replace(weights=r.weights[:1])), "weights has shape"),
        (
            lambda x, w, r: (x, w._replace(gate_up_scale=torch.ones(3, 2, 1)), r),
            "gate_up is torch.float32",
        ),
        (
            lambda x, w, r: (x, w._replace(down=w.down.transpose(1, 2).contiguous().mT), r),
            "down has strides",
        ),
        (lambda x, w, r: (x, w._replace(down_bias=torch.ones(3, 5)), r), "down_bias has shape"),
    ],
)
def test_other_tensors_are_refused(change: Change, named: str) -> None:
    weights = experts_of(3, 12, 16, ExpertActivation.SILU, torch.float32)
    given = change(torch.ones(4, 16), weights, routes_of(4, 3, 2))
    with pytest.raises(BadTensor, match=named):
        expert_feed_forward(*given, ExpertActivation.SILU)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (RoutingRule(7, Scoring.SOFTMAX), "too few"),
        (RoutingRule(4, Scoring.SOFTMAX, num_groups=2), "too few"),
        (RoutingRule(1, Scoring.SOFTMAX, num_groups=4), "expected groups"),
    ],
)
def test_rules_that_the_experts_do_not_fit_are_refused(rule: RoutingRule, named: str) -> None:
    with pytest.raises(BadTensor, match=named):
        route(torch.zeros(1, 6), rule)
