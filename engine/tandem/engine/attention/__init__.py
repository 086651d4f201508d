"""How a model's layers attend to the paged cache: one backend a device, chosen at start."""

from tandem.engine.attention.base import AttentionBackend, Metadata, StepSequences, Support
from tandem.engine.attention.select import select_backend

__all__ = ["AttentionBackend", "Metadata", "StepSequences", "Support", "select_backend"]
