"""Qwen2 and Qwen3 with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.experts import ExpertFacts, Scoring
from tandem.engine.config.families.experts import COUNTS, counts_of, flag
from tandem.engine.config.families.llama import Qwen2, Qwen3
from tandem.engine.config.families.values import positive
from tandem.protocol.errors import InvalidParameter

_ONLY_MLP, _STEP, _WIDTH = "mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size"
_NORM, _SHARED = "norm_topk_prob", "shared_expert_intermediate_size"
_KEYS = frozenset({_ONLY_MLP, _STEP, _WIDTH, _NORM}) | COUNTS


class Qwen2Moe(Qwen2):
    """Qwen2 with experts, one of which all tokens have, times a gate."""

    architectures = ("Qwen2MoeForCausalLM",)
    layers = "tandem.engine.models.moe"
    keys = _KEYS | {_SHARED}
    defaults: ClassVar[Mapping[str, Any]] = {_STEP: 1}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        experts = _experts(config, shared_width=positive(config, _SHARED), shared_gate=True)
        return {**Qwen2.facts(self, config), "experts": experts}


class Qwen3Moe(Qwen3):
    """Qwen3 with experts."""

    architectures = ("Qwen3MoeForCausalLM",)
    layers = "tandem.engine.models.moe"
    keys = _KEYS
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen3.defaults, _STEP: 1}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**Qwen3.facts(self, config), "experts": _experts(config)}


def _experts(config: Mapping[str, Any], **shared: Any) -> ExpertFacts:
    num_experts, chosen = counts_of(config)
    return ExpertFacts(
        num_experts=num_experts,
        experts_per_token=chosen,
        width=positive(config, _WIDTH),
        layers=_sparse_layers(config),
        scoring=Scoring.SOFTMAX,
        norm_topk=flag(config, _NORM),
        **shared,
    )


def _sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers with experts: every few ones, and not those of mlp_only_layers."""
    count, step = positive(config, "num_hidden_layers"), positive(config, _STEP)
    dense = config.get(_ONLY_MLP) or []
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        raise InvalidParameter(f"config.json: {_ONLY_MLP}", dense, "a list of numbers of layers")
    return tuple(i for i in range(count) if i not in dense and (i + 1) % step == 0)
