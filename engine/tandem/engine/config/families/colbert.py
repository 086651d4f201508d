"""ColBERT: BERT with a narrow vector for each token, of which late interaction makes scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from tandem.engine.config.families.bert import Bert
from tandem.engine.config.weight_files import shape_of
from tandem.protocol.errors import InvalidParameter

_LAYER = "linear.weight"
"""[width, hidden]."""
_WIDTHS = ("dim", "colbert_dim", "projection_dim")
_USUAL = 128


class ColBert(Bert):
    """ColBERTv2's format (``HF_ColBERT``): BERT, and a last layer without a bias. Its config.json
    rarely states that layer's width. It is then read from the weights; without weights it is
    128."""

    architectures: ClassVar[tuple[str, ...]] = ("HF_ColBERT", "ColBERTModel")
    saved_as = ("",)

    def completed(self, config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        """See Family."""
        if any(config.get(each) is not None for each in _WIDTHS):
            return config
        shape = shape_of(folder, _LAYER)
        return {**config, _WIDTHS[0]: shape[0]} if shape else config

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Family."""
        found = dict(super().facts(config))
        name = next((each for each in _WIDTHS if config.get(each) is not None), None)
        width = _USUAL if name is None else config[name]
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise InvalidParameter(f"config.json: {name}", width, "a positive integer")
        found["encoder"] = replace(found["encoder"], token_values=width)
        return found
