"""Reads and checks config.json and generation_config.json.

Both the spelling of transformers 5 (``rope_parameters``, ``dtype``) and the older one
(``rope_theta``, ``rope_scaling``, ``torch_dtype``) are read. The files of ``families/`` add what
one family means.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.engine.config.facts import DEFAULT_THETA, ModelFacts, RopeFacts
from tandem.engine.config.families import family_of
from tandem.engine.config.files import read_json
from tandem.engine.config.known_keys import check_keys
from tandem.engine.config.pooling import of_encoder, pooling_of, with_modules
from tandem.engine.config.quantization import quantization_of
from tandem.engine.config.sentences import max_length_of
from tandem.engine.config.tied import check_tied
from tandem.protocol.errors import InvalidParameter

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_ROPE_MAIN = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})


def read_facts(folder: str | Path) -> ModelFacts:
    """Return the facts of the model in ``folder``; InvalidParameter names the wrong key."""
    path = Path(folder)
    config: Mapping[str, Any] = read_json(path / CONFIG, needed=True)
    family = family_of(_architecture(config))
    config = family.completed(config, path)
    check_keys(config, family.keys)
    facts = facts_of(config, read_json(path / GENERATION_CONFIG, needed=False))
    tied, vocab_size = facts.tie_word_embeddings, facts.vocab_size
    if tied and facts.encoder is None:
        check_tied(path)
    pooling = with_modules(facts.pooling, path, tied=tied, vocab_size=vocab_size)
    return replace(facts, pooling=pooling, text_length=max_length_of(path))


def facts_of(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelFacts:
    """Return the facts of a parsed config.json and generation_config.json."""
    architecture = _architecture(config)
    family = family_of(architecture)
    config = {**config, **_absent(config, family.defaults)}
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    bias = bool(config.get("attention_bias", False))
    said: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": _positive(config, "num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": _positive(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": _kv_heads(config, num_heads),
        "head_dim": _head_dim(config, hidden_size, num_heads),
        "vocab_size": _positive(config, "vocab_size"),
        "max_position_embeddings": _positive(config, "max_position_embeddings"),
        "rope": _rope(config),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rms_norm_eps": _number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "hidden_act": str(config.get("hidden_act", "silu")),
        "sliding_window": _sliding_window(config),
        "eos_token_ids": _eos(config, generation or {}),
        "dtype": _dtype(config),
        "quantization": quantization_of(config),
        "pooling": pooling_of(config, architecture),
    }
    facts = ModelFacts(**{**said, **family.facts(config)})
    if facts.encoder is None:
        _check_causal(config)
        return facts
    return replace(facts, pooling=of_encoder(facts.pooling, facts.encoder))


def _absent(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in defaults.items() if config.get(name) is None}


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParameter(f"{CONFIG}: {name}", value, "a positive integer")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameter(f"{CONFIG}: {name}", value, "a finite number")
    return float(value)


def _check_causal(config: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for decoders that were trained with bidirectional attention: their
    vectors would differ here."""
    if config.get("is_causal") is False:
        allowed = "true: tokens of this architecture see earlier ones alone"
        raise InvalidParameter(f"{CONFIG}: is_causal", False, allowed)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InvalidParameter(f"{CONFIG}: architectures", names, "a list with a class name")
    return names[0]


def _kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    if config.get("num_key_value_heads") is None:
        return num_heads
    count = _positive(config, "num_key_value_heads")
    if num_heads % count:
        raise InvalidParameter(
            f"{CONFIG}: num_key_value_heads", count, f"a divisor of the {num_heads} heads"
        )
    return count


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim")
    if hidden_size % num_heads:
        raise InvalidParameter(
            f"{CONFIG}: hidden_size", hidden_size, f"a multiple of the {num_heads} heads"
        )
    return hidden_size // num_heads


def _rope(config: Mapping[str, Any]) -> RopeFacts:
    """Return the rope facts of transformers 5: rope_scaling, if set, replaces rope_parameters."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    said = config.get(key) or {}
    if not isinstance(said, Mapping) or any(isinstance(each, Mapping) for each in said.values()):
        allowed = "an object of numbers: one rotary embedding for all layers"
        raise InvalidParameter(f"{CONFIG}: {key}", said, allowed)
    name = f"{key}.rope_theta" if "rope_theta" in said else "rope_theta"
    theta = _number(name, said.get("rope_theta", config.get("rope_theta") or DEFAULT_THETA))
    if theta <= 0:
        raise InvalidParameter(f"{CONFIG}: {name}", theta, "a number above 0")
    partial = said.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return RopeFacts(
        theta=theta,
        kind=str(said.get("rope_type", said.get("type", "default"))),
        scaling={key: value for key, value in said.items() if key not in _ROPE_MAIN},
        partial=_number("partial_rotary_factor", partial),
    )


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    return window if isinstance(window, int) and window > 0 else None


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a sequence; first generation_config's, with the end of a chat
    turn."""
    for source in (generation, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(value)
    return ()


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None
