"""Attention over the paged cache or the prompt itself: one backend a device, chosen at start."""

from tandem.engine.attention.base import (
    AttentionBackend,
    Metadata,
    StepSequences,
    Support,
)
from tandem.engine.attention.select import select_backend
from tandem.kernels.attention.bidirectional import WholePrompts

__all__ = [
    "AttentionBackend",
    "Metadata",
    "StepSequences",
    "Support",
    "WholePrompts",
    "select_backend",
]
