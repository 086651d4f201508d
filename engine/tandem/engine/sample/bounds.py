"""What grammars allow, applied to logits.

A grammar outranks every other mask: where nothing of it is left by them, the best token that it
allows comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import eq

import numpy as np
import torch
from torch import Tensor

from tandem.engine.sample.transfer import counting, index_on, on_device
from tandem.kernels.sampling import keep_bits

STAGES = 3
"""Steps of which two may be in flight, and one is written."""
PART = 64
"""Rows at a time: bounds what their copies take of the device."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bits of some rows of logits."""

    rows: Tensor
    """int64 [bounded]."""
    words: Tensor
    """int32 [bounded, ceil(vocabulary / 32)], the lowest bit the lowest id; where the logits are.
    """

    @classmethod
    def of(cls, rows: Sequence[int], words: Tensor, device: torch.device) -> Bounds:
        """From int32 words on the host, a row for each of ``rows``."""
        return cls(index_on(rows, device), on_device(words, device))

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's best token that is allowed (int64) and its logit: before other masks."""
        found = []
        for rows, words in self._parts():
            part = logits.index_select(0, rows)
            keep_bits(part, words, counting(len(rows), logits.device))
            found.append(part.max(-1))
        return torch.cat([each.indices for each in found]), torch.cat([e.values for e in found])

    def keep(self, logits: Tensor, best: tuple[Tensor, Tensor] | None = None) -> None:
        """-inf for every token that a row's bits do not allow, in place. ``best`` as it was before
        other masks, if there were any: comes back where they left nothing."""
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
    """Where graphs find what bounds the draws of a step, at the same place for every step.

    Words are written into pinned memory and copied from there: as many as there are bounded rows.
    By numpy, whose copies are of one thread: torch's wait for all of its threads, which the threads
    that make masks keep from running.
    """

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        """For ``rows`` bounded rows at most, of ``words`` int32 each."""
        pinned = device.type == "cuda"
        self._words = torch.zeros(rows, words, dtype=torch.int32, device=device)
        self._rows = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._host = [
            (
                torch.zeros(rows, words, dtype=torch.int32, pin_memory=pinned),
                torch.full((rows,), -1, dtype=torch.int64, pin_memory=pinned),
            )
            for _ in range(STAGES if pinned else 1)
        ]
        self._written = [(words.numpy(), rows.numpy()) for words, rows in self._host]
        self._turn = 0

    @property
    def capacity(self) -> int:
        """Bounded rows that it holds."""
        return len(self._rows)

    def all_of(self, rows: int) -> Bounds:
        """What a graph of so many rows of logits reads; behind what was put, rows are -1."""
        return Bounds(self._rows[:rows], self._words[:rows])

    def put(self, rows: Sequence[int], places: Sequence[int], words: Tensor) -> Bounds:
        """What bounds the coming step's draws: row ``places[i]`` of ``words`` (int32, on the host)
        the logits' row ``rows[i]``. Queued behind what was launched."""
        self._turn = (self._turn + 1) % len(self._host)
        to_words, to_rows = self._written[self._turn]
        count, source = len(rows), words.numpy()
        if count == len(source) and all(map(eq, places, range(count))):
            to_words[:count] = source
        else:
            np.take(source, places, axis=0, out=to_words[:count])
        to_rows[:count], to_rows[count:] = rows, -1
        host_words, host_rows = self._host[self._turn]
        self._words[:count].copy_(host_words[:count], non_blocking=True)
        self._rows.copy_(host_rows, non_blocking=True)
        return self.all_of(count)
