"""StarCoder2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.families.llama import Mistral
from tandem.engine.config.families.values import check_only, number

_ONLY = {
    "use_bias": (True, False),
    "attention_softmax_in_fp32": (True,),
    "scale_attention_softmax_in_fp32": (True,),
    "scale_attn_weights": (True,),
    "mlp_type": ("default",),
}


class Starcoder2(Mistral):
    """Mistral with LayerNorm, biases and an MLP without a gate."""

    architectures = ("Starcoder2ForCausalLM",)
    activations = ("gelu_pytorch_tanh",)
    layers = "tandem.engine.models.starcoder2"
    keys = frozenset({"norm_epsilon", "layer_norm_epsilon", "residual_dropout", *_ONLY})
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_bias": True,
    }

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        check_only(config, {**_ONLY, "layer_norm_epsilon": (config["norm_epsilon"],)})
        bias = config["use_bias"]
        return {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "mlp_bias": bias,
            "rms_norm_eps": number("norm_epsilon", config["norm_epsilon"]),
            **Mistral.facts(self, {"sliding_window": None, **config}),
        }
