"""Pipeline from logits to tokens.

raw log-probabilities → float32 → external processors that change the best token → allowed ids → bad
words → min tokens → grammar → logit bias → penalties → best token, or external processors that keep
it → temperature → min-p → top-k → top-p → draw → log-probabilities.

Raw logits are never written to, so they are scored once the token is known. Each row passes only
the stages of its request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.sample.batch import SamplingBatch, SamplingKind
from tandem.engine.sample.edits import edit
from tandem.engine.sample.logprobs import LogprobTensors, score
from tandem.engine.sample.transfer import counting, index_on
from tandem.kernels.sampling import Columns, best, draw, gather, thresholds


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of one step, by row and choice."""

    rows: NDArray[np.int64]
    """Row of the logits of each draw."""
    choices: NDArray[np.int64]
    one_a_row: bool
    """Whether draw i is of row i of the logits, for each row."""

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> Draws:
        counts = np.fromiter(map(len, choices), dtype=np.int64, count=len(choices))
        flat = [choice for each in choices for choice in each]
        rows = np.repeat(np.arange(len(choices)), counts)
        return cls(rows, np.array(flat, dtype=np.int64), bool((counts == 1).all()))

    def within(self, part: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the draws of the logits rows in ``part`` (ascending), and their rows' places in
        it."""
        if self.one_a_row:
            return part, np.arange(len(part))
        draws = np.flatnonzero(np.isin(self.rows, part))
        return draws, np.searchsorted(part, self.rows[draws])


Numbers = NDArray[np.int64]

PART = {"cpu": 32, "cuda": 256}
"""Rows per pass by device, which bounds their float32 copies."""


class SamplerOutput(NamedTuple):
    """Result of a step's draws, on the logits' device."""

    token_ids: Tensor
    """int64 [draws], by row and choice."""
    logprobs: LogprobTensors | None
    """Log-probabilities of the draws that requested them; None if none did."""


class _Step(NamedTuple):
    """Input of the stages for one step, parallel to the rows of logits."""

    logits: Tensor
    batch: SamplingBatch
    rows: Numbers
    """Row of the batch."""
    positions: Numbers
    draws: Draws
    drawn_at: Tensor | None
    """int64: positions by which draws are made; None is ``positions``."""


class Sampler:
    """Draws tokens, without state between steps."""

    def __init__(self, vocab_size: int) -> None:
        """Logits beyond ``vocab_size`` are padding and never drawn."""
        self.vocab_size = vocab_size

    def sample(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        *,
        rows: Sequence[int] | Numbers,
        positions: Sequence[int] | Numbers,
        choices: Sequence[Sequence[int]],
        drawn_at: Tensor | None = None,
    ) -> SamplerOutput:
        """Draw for each choice of each row; ``logits`` are not written to.

        ``logits`` are raw float32, bfloat16 or float16 [rows, at least the vocabulary]. ``rows``
        (of the batch), ``positions`` (output positions from 0) and ``choices`` are parallel to
        them. ``batch`` must have every emitted token of rows that ``need_tokens``. ``drawn_at``
        (int64, on the device) are the positions if the host may not know them; those of rows with
        rules that depend on a position are exact in any case.
        """
        step = _Step(
            logits[:, : self.vocab_size],
            batch,
            np.asarray(rows, dtype=np.int64),
            np.asarray(positions, dtype=np.int64),
            Draws.of(choices),
            drawn_at,
        )
        token_ids = _choose(step)
        return SamplerOutput(token_ids, _score(step, token_ids))

    def choose_alike(
        self, logits: Tensor, kind: SamplingKind, columns: Columns, draws: Tensor
    ) -> Tensor:
        """Return the draws (int64 [rows]) of rows of one ``kind``, without rules, one token each.

        A CUDA graph can hold it. ``logits`` as for ``sample``; ``columns`` on their device;
        ``draws`` dense int64 [3, rows]: row of the batch, choice, output position.
        """
        logits = logits[:, : self.vocab_size]
        if kind is SamplingKind.GREEDY:
            return best(logits)
        each = counting(draws.shape[1], draws.device)
        return _drawn(logits, columns, draws[0], draws, each, keep_all=kind is SamplingKind.DRAWN)


def _choose(step: _Step) -> Tensor:
    greedy, *drawn = _sort(step)
    alike = step.draws.one_a_row and any(_whole(step, each) for each in drawn)
    if alike and len(step.rows) <= PART[step.logits.device.type]:
        return _draw(step, np.arange(len(step.rows)), keep_all=len(drawn[0]) > 0)
    every = len(greedy) + sum(map(len, drawn)) == len(step.rows)
    if every and len(step.rows):
        token_ids = torch.empty(len(step.draws.rows), dtype=torch.int64, device=step.logits.device)
    else:
        token_ids = best(step.logits)
        if not step.draws.one_a_row:
            token_ids = token_ids[_index(step.draws.rows, token_ids)]
    for part in _parts(greedy, step.logits):
        at, local = step.draws.within(part)
        token_ids[_index(at, token_ids)] = best(_edited(step, part))[_index(local, token_ids)]
    for group, keep_all in zip(drawn, (True, False), strict=True):
        for part in _parts(group, step.logits):
            at, _ = step.draws.within(part)
            token_ids[_index(at, token_ids)] = _draw(step, part, keep_all=keep_all)
    return token_ids


def _sort(step: _Step) -> tuple[Numbers, Numbers, Numbers]:
    """Return the rows that need more than an argmax: greedy with rules, drawn, drawn and filtered.

    The kind depends on the row only.
    """
    batch, kinds = step.batch, step.batch.kinds[step.rows]
    ruled = [
        at
        for at in (np.flatnonzero(kinds == SamplingKind.GREEDY) if _changes(batch) else ())
        if batch.edits(int(step.rows[at]), int(step.positions[at]))
    ]
    greedy = np.array(ruled, dtype=np.int64)
    return (
        greedy,
        np.flatnonzero(kinds == SamplingKind.DRAWN),
        np.flatnonzero(kinds == SamplingKind.FILTERED),
    )


def _whole(step: _Step, part: Numbers) -> bool:
    return len(part) == len(step.rows) > 0


def _changes(batch: SamplingBatch) -> bool:
    return bool(batch.rules or batch.masks or batch.processors)


def _edited(step: _Step, part: Numbers, *, drawn: bool = False) -> Tensor:
    """Return rows of logits after every rule, [part, vocabulary]; float32 if a rule applies. If
    ``drawn``, processors that keep the argmax are applied, too."""
    whole = _whole(step, part)
    logits = step.logits if whole else step.logits.index_select(0, _index(part, step.logits))
    batch = step.batch
    if not _changes(batch):
        return logits
    rows, positions = step.rows[part].tolist(), step.positions[part].tolist()
    edits = any(map(batch.edits, rows, positions))
    reshapes = drawn and any(map(batch.reshapes, rows))
    if edits or reshapes:
        logits = logits.float() if logits.dtype != torch.float32 or not whole else logits.clone()
    if edits:
        edit(logits, batch, rows, positions)
    if reshapes and batch.processors is not None:
        batch.processors.apply(logits, rows, keeps_argmax=True)
    return logits


def _draw(step: _Step, part: Numbers, *, keep_all: bool) -> Tensor:
    """Return int64 [draws of the part]."""
    logits, device = _edited(step, part, drawn=True), step.logits.device
    draws, local = step.draws.within(part)
    rows, positions = step.rows[part], step.positions[part]
    numbers = np.stack((rows[local], step.draws.choices[draws], positions[local]))
    wanted = index_on(numbers, device)
    if step.drawn_at is not None:
        wanted[2] = step.drawn_at[index_on(part[local], device)]
    columns = step.batch.drawing_on(device)
    if step.draws.one_a_row:
        asked, owners = wanted[0], counting(len(part), device)
    else:
        asked, owners = index_on(rows, device), index_on(local, device)
    return _drawn(logits, columns, asked, wanted, owners, keep_all=keep_all)


def _drawn(
    logits: Tensor, columns: Columns, rows: Tensor, draws: Tensor, owners: Tensor, *, keep_all: bool
) -> Tensor:
    """Return int64 [draws]. ``rows`` are batch rows by row of logits, ``owners`` rows of logits by
    draw."""
    asked = gather(columns, rows, draws)
    floor = None
    if not keep_all:
        floor = thresholds(logits, asked.filters, temperature=asked.temperature)
    return draw(logits, asked.keys, owners, temperature=asked.temperature, floor=floor)


def _score(step: _Step, token_ids: Tensor) -> LogprobTensors | None:
    wanted = step.batch.logprobs
    if not wanted:
        return None
    owners = step.rows[step.draws.rows].tolist()
    draws = [d for d, row in enumerate(owners) if row in wanted]
    if not draws:
        return None
    rows = step.draws.rows[draws].tolist()
    counts = [wanted[owners[draw]] for draw in draws]
    return score(step.logits, token_ids, rows=rows, draws=draws, counts=counts)


def _parts(rows: Numbers, logits: Tensor) -> Iterator[Numbers]:
    size = PART[logits.device.type]
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _index(numbers: Numbers, like: Tensor) -> Tensor:
    return index_on(numbers, like.device)
