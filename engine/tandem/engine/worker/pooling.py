"""Vectors of prompts that are pooled: what they want of a step's hidden states, and give.

A mean is summed chunk by chunk in float32 on the device; it starts with the prompt, since nothing
of it comes from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from tandem.engine.step import NewSequence, SeqId, StepRow
from tandem.protocol.pooling import PoolingParams, PoolingType


class Pooled(NamedTuple):
    """A row's share of a step that belongs to its vector."""

    row: StepRow
    params: PoolingParams
    tokens: NDArray[np.int64]
    """Which of the step's tokens."""
    num_prompt: int
    ends: bool
    """Whether the prompt ends with it."""


@dataclass(slots=True)
class Poolers:
    """The sequences of a rank that are pooled. False where there are none."""

    _params: dict[SeqId, tuple[PoolingParams, int]] = field(default_factory=dict)
    """With the length of the prompt."""
    _sums: dict[SeqId, Tensor] = field(default_factory=dict)
    """float32 [hidden], of means whose prompts go on."""

    def __bool__(self) -> bool:
        return bool(self._params)

    def add(self, new: NewSequence) -> None:
        """A sequence that is pooled is here."""
        assert new.pooling is not None
        self._params[new.seq] = (new.pooling, new.num_prompt)

    def drop(self, seq: SeqId) -> None:
        """Forget a sequence, pooled or not."""
        if self._params:
            self._params.pop(seq, None)
            self._sums.pop(seq, None)

    def wanted(self, rows: Sequence[StepRow], lasts: NDArray[np.int64]) -> list[Pooled]:
        """What the step's ``rows`` give; ``lasts`` are their last tokens among the step's."""
        found = []
        for row, last in zip(rows, lasts.tolist(), strict=True):
            if row.seq in self._params:
                params, num_prompt = self._params[row.seq]
                ends = row.num_computed + row.num_tokens == num_prompt
                first = last + 1 - row.num_tokens
                if params.pooling_type == PoolingType.MEAN:
                    found.append(Pooled(row, params, np.arange(first, last + 1), num_prompt, ends))
                elif ends:
                    found.append(Pooled(row, params, np.array([last]), num_prompt, ends))
        return found

    def pool(self, wanted: Sequence[Pooled], hidden: Tensor) -> dict[SeqId, Tensor]:
        """float32 [hidden] vectors, on their way to the host, of the prompts that end; ``hidden``
        [tokens, hidden] are the states of all tokens of ``wanted``, in order."""
        vectors, at = {}, 0
        for each in wanted:
            vector = hidden[at : at + len(each.tokens)].float().sum(0)
            at += len(each.tokens)
            seq = each.row.seq
            if each.params.pooling_type == PoolingType.MEAN:
                if each.row.num_computed:
                    vector += self._sums.pop(seq)
                if not each.ends:
                    self._sums[seq] = vector
                    continue
                vector /= each.num_prompt
            if each.params.normalize:
                vector = normalize(vector, dim=0)
            vectors[seq] = vector.to("cpu", non_blocking=True)
        return vectors


def as_bytes(vector: Tensor) -> bytes:
    """A float32 vector on the host as ``PooledOutput.values``."""
    assert vector.dtype == torch.float32
    return vector.numpy().astype("<f4", copy=False).tobytes()
