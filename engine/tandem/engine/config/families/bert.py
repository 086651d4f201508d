"""BERT: an encoder, whose tokens attend in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.facts import EncoderFacts
from tandem.engine.config.families.base import Family
from tandem.protocol.errors import InvalidParameter


class Bert(Family):
    """An encoder with a table of positions and one of token types. One that was saved with its head
    for masked tokens gives the vectors of its layers; that head is not loaded.
    """

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
        """See Family."""
        return encoder_facts(config, position_offset=0)


def encoder_facts(config: Mapping[str, Any], *, position_offset: int) -> Mapping[str, Any]:
    """Return the fields of ModelFacts of an encoder whose first token has row ``position_offset``
    of the table of positions.

    Raises InvalidParameter, naming the key, for a variant that is not computed.
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
        "encoder": EncoderFacts(
            num_positions=positions,
            position_offset=position_offset,
            num_token_types=types,
            layer_norm_eps=float(config["layer_norm_eps"]),
        ),
    }
