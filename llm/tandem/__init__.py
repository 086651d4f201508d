"""Package ``tandem``: ``from tandem import LLM, SamplingParams``.

In a checkout its parts are in separate folders, and only this one has an ``__init__.py``. Names are
imported on first use.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)
if __spec__ is not None:
    __spec__.has_location = False  # a namespace for import-linter

if TYPE_CHECKING:
    from tandem.llm import (
        LLM,
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        PoolingRequestOutput,
        RequestOutput,
        SamplingParams,
        ScoringRequestOutput,
        StructuredOutputsParams,
    )

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


def __getattr__(name: str) -> Any:
    """Return one of ``__all__``. Raises AttributeError that names the nearest one."""
    if name in __all__:
        import tandem.llm

        return getattr(tandem.llm, name)
    near = "" if name.startswith("_") else _nearest(name)
    raise AttributeError(f"module 'tandem' has no attribute {name!r}{near}")


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, __all__, n=1, cutoff=0.6)
    return f"; {found[0]} is the nearest" if found else ""
