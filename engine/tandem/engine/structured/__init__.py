"""Structured output: answers that a grammar allows, without torch.

``StructuredOutputManager`` is the gate that compiles grammars. A ``Constraint`` follows one
request's tokens and makes masks next to the step loop. ``backends`` has an adapter for each
library.
"""

from tandem.engine.structured.backends.base import GrammarBackend
from tandem.engine.structured.errors import GrammarError, NoBackend
from tandem.engine.structured.manager import StructuredOutputManager, structured_outputs

__all__ = [
    "GrammarBackend",
    "GrammarError",
    "NoBackend",
    "StructuredOutputManager",
    "structured_outputs",
]
