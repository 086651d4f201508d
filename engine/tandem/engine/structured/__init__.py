"""Structured output: answers that a grammar allows. No torch in this process.

``StructuredOutputManager`` is the gate of requests with ``structured_outputs``: it has their
grammars compiled. A ``Constraint`` then follows the tokens of one request, and has the mask of the
next token made next to the step loop. ``backends`` has an adapter for each library.
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
