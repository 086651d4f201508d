"""Grammars by outlines-core: an expression becomes a table of states, and masks are read off it.

What is asked for is checked and rewritten here first (``expressions``, ``schemas``), since
outlines-core passes over what it does not know. Whatever may blow up is done in a process of its
own with limits of the kernel (``compile_process``, ``child``), which answers with plain arrays
(``tables``); ``grammar`` walks them over the tokens of a vocabulary (``vocabulary``).
"""

from tandem.engine.structured.outlines.compiler import OutlinesCompiler

__all__ = ["OutlinesCompiler"]
