"""Facts of an encoder from config.json, and the engine's settings that do not apply to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.config.scheduler import PROMPT_CUTS, SchedulerConfig
from tandem.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from tandem.engine.config.cache import CacheConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """Facts of an encoder that no decoder has: its tokens attend in both directions, and have
    tables of positions and types."""

    num_positions: int
    """Rows of the table of positions."""
    position_offset: int = 0
    """Row of a prompt's first token: RoBERTa keeps the rows up to its padding token's."""
    num_token_types: int = 1
    """Rows of the table of token types; with two a pair's second text is of the other type."""
    layer_norm_eps: float = 1e-12
    token_values: int | None = None
    """Values of a token's vector if a layer after the last makes it, for late interaction."""


def check_settings(cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    """Raise InvalidParameter that names a setting of KV that is kept, or of prompts that are cut:
    an encoder keeps none, and computes a prompt in one step."""
    for name in ("kv_cache_memory_bytes", "kv_offloading_size"):
        if getattr(cache, name) is not None:
            raise InvalidParameter(name, getattr(cache, name), "none: an encoder keeps no KV")
    if cache.kv_cache_dtype != "auto":
        allowed = "auto: an encoder keeps no KV"
        raise InvalidParameter("kv_cache_dtype", cache.kv_cache_dtype, allowed)
    for name in ("long_prefill_token_threshold", *PROMPT_CUTS):
        if getattr(scheduler, name) is not None:
            allowed = "none: an encoder computes a prompt in one step"
            raise InvalidParameter(name, getattr(scheduler, name), allowed)
