"""The pipeline from logits to tokens, in the order that the design fixes.

raw log-probabilities → float32 → allowed ids → bad words → min tokens → logit bias → penalties →
best token, or temperature → min-p → top-k → top-p → draw → log-probabilities. The first and the
last are one stage here: raw logits are never written to, so they are scored when the token is
known. Each row goes through the stages that its request asked for, and no others; a step of
greedy rows without rules is one argmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.sample.batch import SamplingBatch
from tandem.engine.sample.draws import Draws
from tandem.engine.sample.edits import edit
from tandem.engine.sample.filters import floors_of
from tandem.engine.sample.logprobs import LogprobTensors, score
from tandem.engine.sample.transfer import index_on, on_device
from tandem.kernels.sampling import Purpose, best, draw, row_keys

PART = {"cpu": 32, "cuda": 256}
"""Rows that go through the stages at a time, by device: bounds their float32 copies."""


class SamplerOutput(NamedTuple):
    """What a step drew. Tensors lie where the logits were; nothing here waits for the device."""

    token_ids: Tensor
    """int64 [draws]: row by row, within a row in the order of its choices."""
    logprobs: LogprobTensors | None
    """Of the draws that asked; None if none did."""


class _Step(NamedTuple):
    """What the stages need to know of one step. Sequences are parallel to the rows of logits."""

    logits: Tensor
    batch: SamplingBatch
    rows: Sequence[int]
    """Row of the batch."""
    positions: Sequence[int]
    draws: Draws


class Sampler:
    """Draws tokens. Holds no state between steps."""

    def __init__(self, vocab_size: int) -> None:
        """Logits beyond ``vocab_size`` are padding and never drawn."""
        self.vocab_size = vocab_size

    def sample(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        *,
        rows: Sequence[int],
        positions: Sequence[int],
        choices: Sequence[Sequence[int]],
    ) -> SamplerOutput:
        """Draw for each choice of each row. ``logits`` are not written to.

        Args:
            logits: float32, bfloat16 or float16 [rows, at least the vocabulary], raw.
            batch: where the rows' parameters are, up to date with every emitted token of rows
                that ``need_tokens``.
            rows: row of the batch of each row of logits.
            positions: output position (from 0) that each row of logits is drawn for.
            choices: choices to draw from each row of logits; usually one.
        """
        step = _Step(logits[:, : self.vocab_size], batch, rows, positions, Draws.of(choices))
        token_ids = _choose(step)
        return SamplerOutput(token_ids, _score(step, token_ids))


def _choose(step: _Step) -> Tensor:
    greedy, drawn, filtered = _sort(step)
    every = len(greedy) + len(drawn) + len(filtered) == len(step.rows)
    if every and step.rows:
        token_ids = torch.empty(len(step.draws.rows), dtype=torch.int64, device=step.logits.device)
    else:
        token_ids = best(step.logits)
        if not step.draws.one_a_row(len(step.rows)):
            token_ids = token_ids[_index(step.draws.rows, token_ids)]
    for part in _parts(greedy, step.logits):
        at, local = step.draws.within(part)
        token_ids[_index(at, token_ids)] = best(_edited(step, part))[_index(local, token_ids)]
    for group, keep_all in ((drawn, True), (filtered, False)):
        for part in _parts(group, step.logits):
            at, _ = step.draws.within(part)
            token_ids[_index(at, token_ids)] = _draw(step, part, keep_all=keep_all)
    return token_ids


def _sort(step: _Step) -> tuple[list[int], list[int], list[int]]:
    """Rows of logits that need more than an argmax: greedy with rules, drawn, drawn and filtered.

    How a row is treated depends on the row alone, never on its neighbours.
    """
    greedy: list[int] = []
    drawn: list[int] = []
    filtered: list[int] = []
    batch = step.batch
    if batch.random or batch.rules:
        for at, row in enumerate(step.rows):
            if row in batch.filtered:
                filtered.append(at)
            elif row in batch.random:
                drawn.append(at)
            elif batch.rules_at(row, step.positions[at]) is not None:
                greedy.append(at)
    return greedy, drawn, filtered


def _edited(step: _Step, part: Sequence[int]) -> Tensor:
    """Some rows of logits after every rule, [part, vocabulary]; float32 if a rule applies."""
    rows = [step.rows[at] for at in part]
    positions = [step.positions[at] for at in part]
    whole = list(part) == list(range(step.logits.shape[0]))
    logits = step.logits if whole else step.logits.index_select(0, _index(part, step.logits))
    rules = [step.batch.rules_at(row, at) for row, at in zip(rows, positions, strict=True)]
    if any(each is not None for each in rules):
        logits = logits.float() if logits.dtype != torch.float32 or not whole else logits.clone()
        edit(logits, step.batch, rows, positions)
    return logits


def _draw(step: _Step, part: Sequence[int], *, keep_all: bool) -> Tensor:
    """int64 [draws of the part]."""
    logits, batch = _edited(step, part), step.batch
    rows = [step.rows[at] for at in part]
    index = torch.tensor(rows)
    temperature = on_device(batch.temperature[index], logits.device)
    floor = None if keep_all else floors_of(logits, temperature, batch, rows)
    draws, local = step.draws.within(part)
    keys = row_keys(
        batch.seeds[index[torch.tensor(local, dtype=torch.int64)]],
        torch.tensor([step.draws.choices[draw] for draw in draws], dtype=torch.int64),
        torch.tensor([step.positions[part[at]] for at in local], dtype=torch.int64),
        Purpose.TOKEN,
    )
    return draw(
        logits,
        on_device(keys, logits.device),
        _index(local, logits),
        temperature=temperature,
        floor=floor,
    )


def _score(step: _Step, token_ids: Tensor) -> LogprobTensors | None:
    wanted = step.batch.logprobs
    if not wanted:
        return None
    draws = [d for d, row in enumerate(step.draws.rows) if step.rows[row] in wanted]
    if not draws:
        return None
    rows = [step.draws.rows[draw] for draw in draws]
    counts = [wanted[step.rows[row]] for row in rows]
    return score(step.logits, token_ids, rows=rows, draws=draws, counts=counts)


def _parts(rows: Sequence[int], logits: Tensor) -> Iterator[Sequence[int]]:
    size = PART[logits.device.type]
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _index(numbers: Sequence[int], like: Tensor) -> Tensor:
    return index_on(numbers, like.device)
