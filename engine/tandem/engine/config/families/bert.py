"""BERT and its relatives, encoders with bidirectional attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from tandem.engine.config.facts import EncoderFacts
from tandem.engine.config.families.base import Family
from tandem.engine.config.weight_files import shape_of
from tandem.protocol.errors import InvalidParameter


class Bert(Family):
    """Encoder with tables of positions and token types; a head for masked tokens is not loaded."""

    architectures: ClassVar[tuple[str, ...]] = ("BertModel",)
    saved_as: ClassVar[tuple[str, ...]] = ("Model", "ForSequenceClassification", "ForMaskedLM")
    activations = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
    layers = "tandem.engine.models.bert"
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
    }

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return encoder_facts(config, position_offset=0)


def encoder_facts(config: Mapping[str, Any], *, position_offset: int) -> Mapping[str, Any]:
    """Return the fields of an encoder whose first token has row ``position_offset`` of the
    positions.

    Raises InvalidParameter, naming the key, for an unsupported variant.
    """
    kind = config.get("position_embedding_type")
    if kind not in (None, "absolute"):
        raise InvalidParameter("config.json: position_embedding_type", kind, "absolute")
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            raise InvalidParameter(f"config.json: {name}", config[name], "false")
    positions = config["max_position_embeddings"]
    if positions <= position_offset:
        allowed = f"more than {position_offset}, the row of a prompt's first token"
        raise InvalidParameter("config.json: max_position_embeddings", positions, allowed)
    types = config["type_vocab_size"]
    if isinstance(types, bool) or not isinstance(types, int) or types < 1:
        raise InvalidParameter("config.json: type_vocab_size", types, "a positive integer")
    return {
        "max_position_embeddings": positions - position_offset,
        "layer_kinds": (),
        "encoder": EncoderFacts(
            num_positions=positions,
            position_offset=position_offset,
            num_token_types=types,
            layer_norm_eps=float(config["layer_norm_eps"]),
        ),
    }


class Roberta(Bert):
    """RoBERTa, whose positions begin at ``pad_token_id`` plus one. Unlike in transformers, a
    padding token in a prompt is an ordinary token."""

    architectures = ("RobertaModel", "XLMRobertaModel")
    layers = "tandem.engine.models.roberta"
    defaults: ClassVar[Mapping[str, Any]] = {**Bert.defaults, "pad_token_id": 1}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        pad = config["pad_token_id"]
        if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
            raise InvalidParameter("config.json: pad_token_id", pad, "a token id")
        return encoder_facts(config, position_offset=pad + 1)


_LAYER = "linear.weight"
"""[width, hidden]."""
_WIDTHS = ("dim", "colbert_dim", "projection_dim")
_USUAL = 128


class ColBert(Bert):
    """ColBERTv2's format (``HF_ColBERT``): BERT and a last layer without bias. Its width is read
    from the weights unless config.json states it; without weights it is 128."""

    architectures: ClassVar[tuple[str, ...]] = ("HF_ColBERT", "ColBERTModel")
    saved_as = ("",)

    def completed(self, config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        if any(config.get(each) is not None for each in _WIDTHS):
            return config
        shape = shape_of(folder, _LAYER)
        return {**config, _WIDTHS[0]: shape[0]} if shape else config

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        found = dict(super().facts(config))
        name = next((each for each in _WIDTHS if config.get(each) is not None), None)
        width = _USUAL if name is None else config[name]
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise InvalidParameter(f"config.json: {name}", width, "a positive integer")
        found["encoder"] = replace(found["encoder"], token_values=width)
        return found
