"""How many tokens a step's products compute, and what a step still has room for. Pure.

Where ranks have graphs, a step is padded to the smallest that holds it: one prompt token too many
for a graph costs as much as the next graph's tokens. Who bounds a step's time has to know it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.config.scheduler import LEAST_CHUNK_TOKENS
from tandem.engine.kv_memory import StepSize
from tandem.engine.scheduler.chunks import cost_behind


class Padding:
    """Of the steps of ranks that have graphs of ``sizes``, in the order in which they are chosen;
    without any, a step is computed as it is."""

    def __init__(self, sizes: Sequence[StepSize] = ()) -> None:
        self._sizes = tuple(each for each in sizes if each.chunks)

    def tokens(self, decodes: int, chunk_tokens: int, chunks: int) -> int | None:
        """Tokens that are computed of a step with prompts; None if no graph holds it."""
        for size in self._sizes:
            if (
                decodes <= size.decodes
                and chunk_tokens <= size.chunk_tokens
                and chunks <= size.chunks
            ):
                return size.decodes + size.chunk_tokens
        return None

    def weight(self, decodes: int, chunk_tokens: int, chunks: int) -> int:
        """Tokens beside the decodes, padding counted as what it stands beside."""
        return (self.tokens(decodes, chunk_tokens, chunks) or decodes + chunk_tokens) - decodes

    def has_beside(self, decodes: int) -> bool:
        """Whether a graph holds so many decodes with the least of a prompt."""
        return self.tokens(decodes, LEAST_CHUNK_TOKENS, 1) is not None


class StepRoom:
    """What a step beside decodes still has room for, if it may take the time of so many tokens of
    a prompt's start. A step that graphs could hold is kept within one: launching it kernel by
    kernel takes the host longer than any bound of gaps."""

    def __init__(self, padding: Padding, decodes: int, budget: int, steepness: float) -> None:
        self._padding, self._decodes = padding, decodes
        self._budget, self._steepness = budget, steepness
        self._in_graph = padding.has_beside(decodes)
        self._tokens = self._chunks = 0
        self._full = False
        self._seen = 0.0
        """What attention to the tokens before them takes, in tokens of a prompt's start."""

    def most(self, start: int, limit: int) -> int:
        """Tokens behind ``start`` of one more prompt, ``limit`` at most. The first of a step gets
        as many as let a prompt get on."""
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
        """Whether the least of another prompt does not fit, or did not when it was tried."""
        return self._full or (self._chunks > 0 and not self._fits(0, LEAST_CHUNK_TOKENS))

    def take(self, start: int, count: int) -> None:
        """So many tokens of a prompt are in the step."""
        self._seen += cost_behind(start, count, self._steepness) - count
        self._tokens += count
        self._chunks += 1

    def _fits(self, start: int, count: int) -> bool:
        tokens, chunks = self._tokens + count, self._chunks + 1
        if self._in_graph and self._padding.tokens(self._decodes, tokens, chunks) is None:
            return False
        seen = self._seen + cost_behind(start, count, self._steepness) - count
        return self._padding.weight(self._decodes, tokens, chunks) + seen <= self._budget
