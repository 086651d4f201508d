"""Sequences that are computed whole in one step, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """Concatenated sequences: the keys and queries of an encoder.

    A step makes one for all its layers; a backend caches its plan here.
    """

    cu_seqlens: Tensor
    """int32 [sequences + 1]: sequence s is the rows cu_seqlens[s] up to the next. Some may be
    empty, as in a padded CUDA graph."""
    max_len: int
    """Tokens of the longest, or an upper bound."""
    _tiles: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def tiles(self, tokens: int, rows: int) -> Tensor:
        """Return tiles of at most ``rows`` tokens of one sequence each, of ``tokens`` in total.

        int32 [tiles, 3]: first token of the sequence, its length, and the tile's start in it. The
        number of tiles depends on shapes only: unused ones begin after the last sequence's end.
        """
        known = self._tiles.get((tokens, rows))
        if known is None:
            known = self._tiles[tokens, rows] = self._planned(tokens, rows)
        return known

    def _planned(self, tokens: int, rows: int) -> Tensor:
        starts, device = self.cu_seqlens[:-1], self.cu_seqlens.device
        sequences = starts.shape[0]
        of_longest = -(-self.max_len // rows)
        count = min(tokens // rows + sequences, of_longest * sequences)
        if not count:
            return torch.empty(0, 3, dtype=torch.int32, device=device)
        lengths = self.cu_seqlens[1:] - starts
        own = (lengths + (rows - 1)) // rows
        ends = own.cumsum(0, dtype=torch.int32)
        place = torch.arange(count, dtype=torch.int32, device=device)
        of = torch.searchsorted(ends, place, right=True).clamp_(max=sequences - 1)
        first = (place - (ends - own).index_select(0, of)) * rows
        return torch.stack((starts.index_select(0, of), lengths.index_select(0, of), first), dim=1)
