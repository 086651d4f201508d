"""Counts of an offload tier since it was made; metrics show what was added."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OffloadStats:
    """Counts since the start."""

    block_bytes: int
    """Bytes of one block over all layers."""
    num_stored: int = 0
    """Blocks copied to host memory."""
    num_loaded: int = 0
    """Blocks copied back, those of failed loads included."""
    num_evicted: int = 0
    """Blocks that made room for other ones there."""
    num_declined: int = 0
    """Blocks that found no room there, as all that is there was being read."""
    num_failed_loads: int = 0
    hit_tokens: int = 0
    """Tokens that were loaded instead of computed."""
