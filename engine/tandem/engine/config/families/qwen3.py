"""Qwen3, dense: heads of a size of their own, each normed before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tandem.engine.config.families.base import Family, used_window


class Qwen3(Family):
    """Qwen3, whose config.json does not mention the norms; a head is 128 wide at any size."""

    architectures = ("Qwen3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128}

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """See Family."""
        return {"qk_norm": True, "sliding_window": used_window(config)}
