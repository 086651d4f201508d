"""Which blocks each row's tokens are in: one int32 row a sequence, kept between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTable:
    """Blocks by row, in token order. A row that grows too long widens all."""

    def __init__(self, rows: int, columns: int) -> None:
        """Room for ``rows`` sequences of ``columns`` blocks, columns growing."""
        self.blocks: NDArray[np.int32] = np.zeros((max(rows, 1), max(columns, 1)), dtype=np.int32)
        """[rows, columns]; only the first ``counts[row]`` of a row mean something."""
        self.counts: NDArray[np.int32] = np.zeros(max(rows, 1), dtype=np.int32)
        self.version = 0
        """Grows with every change."""

    def assign(self, row: int, block_ids: Sequence[int]) -> None:
        """Forget what ``row`` had; it now has ``block_ids``."""
        self.counts[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """More blocks at the end of ``row``."""
        self.version += 1
        held = int(self.counts[row])
        total = held + len(block_ids)
        if total > self.blocks.shape[1]:
            self._widen(max(total, 2 * self.blocks.shape[1]))
        self.blocks[row, held:total] = block_ids
        self.counts[row] = total

    def _widen(self, columns: int) -> None:
        blocks = np.zeros((self.blocks.shape[0], columns), dtype=np.int32)
        blocks[:, : self.blocks.shape[1]] = self.blocks
        self.blocks = blocks
