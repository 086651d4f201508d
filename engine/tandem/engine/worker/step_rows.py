"""A plan's rows as columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tandem.engine.step import SeqId, StepRow
from tandem.engine.worker.staging import StepShape

_ATTENDED = 8192
"""Earlier tokens whose attention costs as much as the rest of a token's layer."""
_IN_TIME = 3200
"""Tokens of short prompts that one layer computes in a few milliseconds."""
_MOST_LEFT = 5


@dataclass(frozen=True)
class StepRows:
    """A plan's rows as columns, one entry per row."""

    index: NDArray[np.int64]
    """Rows of the batch."""
    first: NDArray[np.int64]
    """Position of the first token."""
    counts: NDArray[np.int64]
    num_decodes: int
    num_tokens: int
    choices: NDArray[np.int64] | None = None
    """Choice of each row; None unless each draws for one."""
    drafted: bool = False
    """Whether rows of several tokens may begin with one that was drawn here."""

    @classmethod
    def of(
        cls, rows: Sequence[StepRow], row_of: Mapping[SeqId, int], *, drafted: bool = False
    ) -> StepRows:
        """Return the columns of ``rows``; ``row_of`` are the rows of the batch."""
        index = np.array([row_of[row.seq] for row in rows], dtype=np.int64)
        first = np.array([row.num_computed for row in rows], dtype=np.int64)
        tokens = [row.num_scheduled_tokens for row in rows]
        counts = np.array(tokens, dtype=np.int64)
        longer = np.flatnonzero(counts > 1)
        decodes = int(longer[0]) if longer.size else len(rows)
        sample_choices = [row.sample_choices for row in rows]
        one_each = {1}.issuperset(map(len, sample_choices))
        choices = (
            np.array([choice for (choice,) in sample_choices], dtype=np.int64) if one_each else None
        )
        return cls(index, first, counts, decodes, sum(tokens), choices, drafted)

    @cached_property
    def lens(self) -> NDArray[np.int64]:
        return self.first + self.counts

    @cached_property
    def shape(self) -> StepShape:
        n = self.num_decodes
        width = int(self.counts[n:].max(initial=0))
        return StepShape(n, self.num_tokens - n, len(self.index) - n, width)

    def as_chunks(self) -> StepRows:
        """Return the same rows without decodes: a row of one token is a chunk, too."""
        return replace(self, num_decodes=0, drafted=True)

    @cached_property
    def layers_left(self) -> int:
        """Return how many of a model's last layers take a few milliseconds."""
        work = float(np.sum(self.counts * (1 + self.lens / _ATTENDED)))
        return int(min(_MOST_LEFT, max(1, _IN_TIME // work)))

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return the last token of each row, among the tokens of the unpadded step."""
        return np.cumsum(self.counts) - 1

    def chunk_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row of the batch and the position of every token that is not a decode's."""
        n = self.num_decodes
        index, first, counts = self.index[n:], self.first[n:], self.counts[n:]
        starts = np.cumsum(counts) - counts
        within = np.arange(self.num_tokens - n, dtype=np.int64) - np.repeat(starts, counts)
        return np.repeat(index, counts), np.repeat(first, counts) + within
