"""Structured output: answers that a grammar allows, and nothing else. No torch.

``StructuredOutputManager`` is the gate that a request with ``structured_outputs`` waits at while
its grammar is compiled beside the step loop; ``Constraint`` is what follows the request's tokens
then and has the mask of the next one made, beside the loop, too. What compiles is a ``Compiler``;
the one here is ``llguidance``.
"""

from tandem.engine.structured.grammar import Compiler, Grammar, GrammarError, NoCompiler
from tandem.engine.structured.manager import StructuredOutputManager, structured_outputs

__all__ = [
    "Compiler",
    "Grammar",
    "GrammarError",
    "NoCompiler",
    "StructuredOutputManager",
    "structured_outputs",
]
