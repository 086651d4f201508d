"""DeepSeek-V2 and V3: multi-head latent attention, and experts after the first layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tandem.engine.config.experts import ExpertFacts, ExpertNames, Scoring
from tandem.engine.config.facts import LatentFacts, RopeFacts
from tandem.engine.config.families.base import Family
from tandem.engine.config.families.experts import flag
from tandem.engine.config.families.values import above_zero, number, positive
from tandem.protocol.card import KVKind
from tandem.protocol.errors import InvalidParameter

_DENSE, _EXPERTS, _CHOSEN = "first_k_dense_replace", "n_routed_experts", "num_experts_per_tok"
_GROUPS, _CHOSEN_GROUPS, _SHARED = "n_group", "topk_group", "n_shared_experts"
_WIDTH, _SCALE, _NORM = "moe_intermediate_size", "routed_scaling_factor", "norm_topk_prob"
_METHOD, _SCORING = "topk_method", "scoring_func"
GREEDY, OF_GROUPS, CORRECTED = "greedy", "group_limited_greedy", "noaux_tc"


class DeepseekV2(Family):
    """DeepSeek-V2, also without q_lora_rank (V2-Lite)."""

    architectures = ("DeepseekV2ForCausalLM",)
    layers = "tandem.engine.models.deepseek"
    keys = frozenset(
        {
            *("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim"),
            *("qk_rope_head_dim", "v_head_dim", "ep_size", "moe_layer_freq", "seq_aux"),
            *(_DENSE, _EXPERTS, _CHOSEN, _GROUPS, _CHOSEN_GROUPS, _SHARED, _WIDTH, _SCALE),
            *(_NORM, _METHOD, _SCORING),
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        _DENSE: 0,
        _GROUPS: 1,
        _CHOSEN_GROUPS: 1,
        _SCALE: 1.0,
        _METHOD: GREEDY,
        _SCORING: "softmax",
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attention_bias": (None, False),
        "moe_layer_freq": (None, 1),
        _METHOD: (GREEDY, OF_GROUPS),
        _SCORING: ("softmax",),
        _NORM: (None, False),
    }
    """Values of keys that the layers compute."""

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, values in self.only.items():
            if config.get(name) not in values:
                allowed = " or ".join(str(each).lower() for each in values if each is not None)
                raise InvalidParameter(f"config.json: {name}", config[name], allowed)
        latent = _latent(config)
        head_dim = latent.nope_dim + latent.rope_dim
        return {
            "latent": latent,
            "head_dim": head_dim,
            "num_kv_heads": positive(config, "num_attention_heads"),
            "layer_kinds": (KVKind.LATENT,) * positive(config, "num_hidden_layers"),
            "attention_scale": head_dim**-0.5 * _growth(self.rope(config)) ** 2,
            "experts": self.experts(config),
        }

    def experts(self, config: Mapping[str, Any]) -> ExpertFacts:
        """Return the experts of the layers after the dense ones; without groups if all are
        chosen."""
        found = _experts(config)
        if config[_METHOD] == GREEDY:
            return replace(found, num_groups=1, chosen_groups=1)
        return found


class DeepseekV3(DeepseekV2):
    """DeepSeek-V3 and R1; the layer that predicts another token is not loaded."""

    architectures = ("DeepseekV3ForCausalLM",)
    keys = DeepseekV2.keys | {"num_nextn_predict_layers", "num_mtp_layers", "rope_interleave"}
    defaults: ClassVar[Mapping[str, Any]] = {
        **DeepseekV2.defaults,
        _DENSE: 3,
        _GROUPS: 8,
        _CHOSEN_GROUPS: 4,
        _SCALE: 2.5,
        _NORM: True,
        _METHOD: CORRECTED,
        _SCORING: "sigmoid",
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attention_bias": (None, False),
        "moe_layer_freq": (None, 1),
        "num_nextn_predict_layers": (None, 0, 1),
        "rope_interleave": (None, True),
        _METHOD: (CORRECTED,),
        _SCORING: ("sigmoid",),
    }

    def experts(self, config: Mapping[str, Any]) -> ExpertFacts:
        return replace(
            _experts(config),
            scoring=Scoring.SIGMOID,
            norm_topk=flag(config, _NORM),
            correction_bias=True,
        )


def _latent(config: Mapping[str, Any]) -> LatentFacts:
    rope, q_rank = positive(config, "qk_rope_head_dim"), config.get("q_lora_rank")
    if rope % 2:
        raise InvalidParameter("config.json: qk_rope_head_dim", rope, "an even number")
    return LatentFacts(
        rank=positive(config, "kv_lora_rank"),
        rope_dim=rope,
        nope_dim=positive(config, "qk_nope_head_dim"),
        value_dim=positive(config, "v_head_dim"),
        q_rank=None if q_rank is None else positive(config, "q_lora_rank"),
    )


def _experts(config: Mapping[str, Any]) -> ExpertFacts:
    """Return the experts of DeepSeek-V2. Raises InvalidParameter."""
    dense, layers = config[_DENSE], positive(config, "num_hidden_layers")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise InvalidParameter(f"config.json: {_DENSE}", dense, "the number of dense layers")
    count, groups = positive(config, _EXPERTS), positive(config, _GROUPS)
    chosen, of_groups = positive(config, _CHOSEN), positive(config, _CHOSEN_GROUPS)
    if count % groups:
        raise InvalidParameter(f"config.json: {_GROUPS}", groups, f"a divisor of {count} experts")
    if of_groups > groups:
        raise InvalidParameter(f"config.json: {_CHOSEN_GROUPS}", of_groups, f"at most {groups}")
    if chosen > count // groups * of_groups:
        allowed = f"at most the {count // groups * of_groups} experts of {of_groups} groups"
        raise InvalidParameter(f"config.json: {_CHOSEN}", chosen, allowed)
    width = positive(config, _WIDTH)
    shared = positive(config, _SHARED) * width if config.get(_SHARED) else None
    return ExpertFacts(
        num_experts=count,
        experts_per_token=chosen,
        width=width,
        layers=tuple(range(dense, layers)),
        scoring=Scoring.SOFTMAX,
        num_groups=groups,
        chosen_groups=of_groups,
        routed_scale=above_zero(_SCALE, config[_SCALE]),
        shared_width=shared,
        names=ExpertNames(shared="shared_experts"),
    )


def _growth(rope: RopeFacts) -> float:
    """Return the factor of queries and of keys in a context stretched by YaRN (mscale_all_dim)."""
    scale = rope.scaling.get("mscale_all_dim")
    if rope.kind == "default" or not scale:
        return 1.0
    stretch = number("rope_parameters.factor", rope.scaling.get("factor"))
    scale = number("rope_parameters.mscale_all_dim", scale)
    return 1.0 if stretch <= 1 else 0.1 * scale * math.log(stretch) + 1.0
