"""Number of tokens that a step computes with padding, and the room that a step has left. Pure.

If ranks have graphs, a step is padded to the smallest that holds it: one prompt token too many for
a graph costs as much as the next graph's tokens. A bound on a step's time has to count them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.config.scheduler import LEAST_CHUNK_TOKENS
from tandem.engine.kv_memory import StepSize
from tandem.engine.scheduler.chunks import cost_behind


class Padding:
    """Padding of steps to graphs of ``sizes``, in the order in which they are chosen. Without
    graphs, a step is not padded."""

    def __init__(self, sizes: Sequence[StepSize] = ()) -> None:
        self._sizes = tuple(each for each in sizes if each.chunks)

    def tokens(self, decodes: int, chunk_tokens: int, chunks: int) -> int | None:
        """Return the computed tokens of a step with prompts; None if no graph holds it."""
        for size in self._sizes:
            if (
                decodes <= size.decodes
                and chunk_tokens <= size.chunk_tokens
                and chunks <= size.chunks
            ):
                return size.decodes + size.chunk_tokens
        return None

    def weight(self, decodes: int, chunk_tokens: int, chunks: int) -> int:
        """Return the tokens in addition to the decodes, padding included."""
        return (self.tokens(decodes, chunk_tokens, chunks) or decodes + chunk_tokens) - decodes

    def has_beside(self, decodes: int) -> bool:
        """Return whether a graph holds so many decodes and the smallest chunk of a prompt."""
        return self.tokens(decodes, LEAST_CHUNK_TOKENS, 1) is not None


class StepRoom:
    """Room for prompts in a step with decodes whose time is bounded, in tokens of a prompt's start.
    A step that graphs can hold is kept within one: launching each kernel takes the host longer than
    any bound of gaps."""

    def __init__(self, padding: Padding, decodes: int, budget: int, steepness: float) -> None:
        self._padding, self._decodes = padding, decodes
        self._budget, self._steepness = budget, steepness
        self._in_graph = padding.has_beside(decodes)
        self._tokens = self._chunks = 0
        self._full = False
        self._seen = 0.0
        """Cost of attention to the tokens before the chunks, in tokens of a prompt's start."""

    def most(self, start: int, limit: int) -> int:
        """Return the tokens after ``start`` that one more prompt may have, ``limit`` at most. The
        first prompt of a step gets at least the smallest chunk."""
        low, high = 0, limit
        if not self._chunks:
            low = min(limit, LEAST_CHUNK_TOKENS)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(start, middle):
                low = middle
            else:
                high = middle - 1
        self._full = low == 0
        return low

    @property
    def is_full(self) -> bool:
        """Return whether the smallest chunk of another prompt does not fit, or did not at the last
        try."""
        return self._full or (self._chunks > 0 and not self._fits(0, LEAST_CHUNK_TOKENS))

    def take(self, start: int, count: int) -> None:
        """Add so many tokens of a prompt to the step."""
        self._seen += cost_behind(start, count, self._steepness) - count
        self._tokens += count
        self._chunks += 1

    def _fits(self, start: int, count: int) -> bool:
        tokens, chunks = self._tokens + count, self._chunks + 1
        if self._in_graph and self._padding.tokens(self._decodes, tokens, chunks) is None:
            return False
        seen = self._seen + cost_behind(start, count, self._steepness) - count
        return self._padding.weight(self._decodes, tokens, chunks) + seen <= self._budget
