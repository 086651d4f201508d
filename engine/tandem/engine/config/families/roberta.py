"""RoBERTa and XLM-RoBERTa: BERT's layers, positions that begin after the padding token's id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.families.bert import Bert, encoder_facts
from tandem.protocol.errors import InvalidParameter


class Roberta(Bert):
    """RoBERTa, whose positions count from ``pad_token_id`` plus one. transformers gives a padding
    token in a prompt the padding's own position; here it is a token like any other."""

    architectures = ("RobertaModel", "XLMRobertaModel")
    layers = "tandem.engine.models.roberta"
    defaults: ClassVar[Mapping[str, Any]] = {**Bert.defaults, "pad_token_id": 1}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Family."""
        pad = config["pad_token_id"]
        if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
            raise InvalidParameter("config.json: pad_token_id", pad, "a token id")
        return encoder_facts(config, position_offset=pad + 1)
