"""Text in, text out over any engine: ``AsyncLLM``, ``LLMEngine``, and ``LLM`` for offline batches.

Only ``offline`` imports an engine. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.llm.offline import LLM
    from tandem.llm.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from tandem.llm.params import PoolingParams, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "ClassificationRequestOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "tandem.llm.offline",
    "ClassificationRequestOutput": "tandem.llm.outputs",
    "EmbeddingRequestOutput": "tandem.llm.outputs",
    "PoolingParams": "tandem.llm.params",
    "PoolingRequestOutput": "tandem.llm.outputs",
    "RequestOutput": "tandem.llm.outputs",
    "SamplingParams": "tandem.llm.params",
    "ScoringRequestOutput": "tandem.llm.outputs",
    "StructuredOutputsParams": "tandem.llm.params",
}


def __getattr__(name: str) -> Any:
    """Return one of ``__all__`` from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
