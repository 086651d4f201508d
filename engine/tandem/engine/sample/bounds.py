"""Bounds of grammars on logits.

A grammar takes precedence over every other mask. If no token is left, the best token of the grammar
is restored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import eq

import numpy as np
import torch
from torch import Tensor

from tandem.engine.sample.transfer import counting, index_on, on_device
from tandem.kernels.sampling import keep_bits

FEW = 256
"""Maximum ids that are copied to the device in each step; more are copied once, as bits."""


class AllowedTokens:
    """Allowed tokens of one request, shared by its choices."""

    def __init__(self, token_ids: Collection[int]) -> None:
        distinct = np.unique(np.fromiter(token_ids, dtype=np.int64, count=len(token_ids)))
        self.token_ids = torch.from_numpy(distinct)
        """int64, distinct."""
        self._words: Tensor | None = None
        """Words on the last used device."""

    @property
    def are_few(self) -> bool:
        """Return whether the list is cheaper than bits of the whole vocabulary."""
        return self.token_ids.numel() <= FEW

    def words_on(self, device: torch.device, vocabulary: int) -> Tensor:
        """Return the bits as int32 [ceil(vocabulary / 32)] on ``device``, lowest bit lowest id;
        copied once."""
        if self._words is None or self._words.device != device:
            bits = np.zeros(-(-vocabulary // 32) * 32, dtype=np.bool_)
            bits[self.token_ids.numpy()] = True
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self._words = on_device(torch.from_numpy(words), device)
        return self._words


STAGES = 3
"""Steps whose memory may be in use: two in flight, one being written."""
PART = 64
"""Rows per pass, which bounds the memory of copies."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bits of some rows of logits."""

    rows: Tensor
    """int64 [bounded]."""
    words: Tensor
    """int32 [bounded, ceil(vocabulary / 32)], lowest bit lowest id, on the logits' device."""

    @classmethod
    def of(cls, rows: Sequence[int], words: Tensor, device: torch.device) -> Bounds:
        """Return bounds from int32 words on the host, a row for each of ``rows``."""
        return cls(index_on(rows, device), on_device(words, device))

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's best allowed token (int64) and its logit, before other masks."""
        found = []
        for rows, words in self._parts():
            part = logits.index_select(0, rows)
            keep_bits(part, words, counting(len(rows), logits.device))
            found.append(part.max(-1))
        return torch.cat([each.indices for each in found]), torch.cat([e.values for e in found])

    def keep(self, logits: Tensor, best: tuple[Tensor, Tensor] | None = None) -> None:
        """Set tokens outside the bits to -inf, in place. ``best`` tokens, from before other masks,
        are restored in rows that would be empty."""
        if best is None:
            keep_bits(logits, self.words, self.rows)
            return
        at = 0
        for rows, words in self._parts():
            tokens, values = (each[at : at + len(rows), None] for each in best)
            part = logits.index_select(0, rows)
            barred = part == -math.inf  # by other masks
            keep_bits(part, words, counting(len(rows), logits.device))
            part.masked_fill_(barred, -math.inf)
            empty = part.amax(-1, keepdim=True) == -math.inf
            part.scatter_(1, tokens, torch.where(empty, values, part.gather(1, tokens)))
            logits.index_copy_(0, rows, part)
            at += len(rows)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.rows), PART):
            yield self.rows[start : start + PART], self.words[start : start + PART]


class BoundsStage:
    """Bounds of a step, at the same device address for every step.

    ``hold`` copies the step's words, ``put`` the rows for graphs; each is called once a step. numpy
    copies, as torch would wait for its threads, which mask threads delay.
    """

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        """Reserve memory for ``rows`` bounded rows of ``words`` int32 each."""
        pinned = device.type == "cuda"
        copies = range(STAGES if pinned else 1)
        self._words = torch.zeros(rows, words, dtype=torch.int32, device=device)
        self._rows = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._host_words = cycle(
            torch.zeros(rows, words, dtype=torch.int32, pin_memory=pinned) for _ in copies
        )
        self._host_rows = cycle(
            torch.full((rows,), -1, dtype=torch.int64, pin_memory=pinned) for _ in copies
        )

    def hold(self, words: Tensor) -> None:
        """Queue a copy of the step's words, int32 [bounded, words] on the host; they may be changed
        at once."""
        count, host = len(words), next(self._host_words)
        np.copyto(host.numpy()[:count], words.numpy())
        self._words[:count].copy_(host[:count], non_blocking=True)

    def put(self, rows: Sequence[int], places: Sequence[int]) -> None:
        """Queue for graphs that row ``places[i]`` of the words bounds the logits' row
        ``rows[i]``."""
        host = next(self._host_rows)
        host.numpy()[:] = -1
        host.numpy()[list(places)] = rows
        self._rows.copy_(host, non_blocking=True)

    def all_of(self, rows: int) -> Bounds:
        """Return the bounds that a graph of ``rows`` rows of logits reads; unused words have -1."""
        return Bounds(self._rows[:rows], self._words[:rows])

    def of(self, rows: Sequence[int], places: Sequence[int]) -> Bounds:
        device = self._words.device
        if all(map(eq, places, range(len(places)))):
            words = self._words[: len(places)]
        else:
            words = self._words.index_select(0, index_on(places, device))
        return Bounds(index_on(rows, device), words)
