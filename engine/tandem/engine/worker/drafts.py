"""Known tokens of a rank's rows on its device, and the drafts proposed after them.

The next step is launched before the host knows how many drafts were accepted: its rows begin after
the device's count (`tandem.kernels.drafts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.models import CausalModel
from tandem.engine.sample.rules import RowRules
from tandem.engine.sample.transfer import index_on
from tandem.engine.step import SeqId, SpecTokens, StepRow
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.inputs import StepInputs
from tandem.engine.worker.step_rows import StepRows
from tandem.kernels.drafts import MOST_TOKENS, NONE, TokenHistory, accept, place

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Model and states of a step's samples."""

    model: CausalModel
    states: Tensor
    """[positions, hidden]: states after the last norm, from which each was sampled."""
    first: Numbers | None = None
    """First position of each row; None if each has one."""

    def after(self, accepted: Tensor) -> Tensor:
        """Return [rows, hidden]: the state of each row's last kept sample, after so many accepted
        drafts, int64 [rows]."""
        if self.first is None:
            return self.states
        return self.states.index_select(0, index_on(self.first, accepted.device) + accepted)


class Proposer(Protocol):
    """Source of drafts, which runs on the device after each step."""

    def propose(self, history: TokenHistory, rows: Tensor, results: Tensor, drawn: Drawn) -> None:
        """Set the drafts of ``rows`` (int64, of the batch). ``results`` are those of `accept`, with
        a row for the numbers of drafts."""
        ...


@dataclass(frozen=True)
class SpecSamples:
    """Rows of logits of a step in which some rows have several, in parallel arrays."""

    tokens: Numbers
    """Token of the unpadded step after which each row of logits samples."""
    rows: Numbers
    """Row of the batch."""
    places: Numbers
    """Row of the unpadded step."""
    positions: Numbers
    """Output position of each sample; after drafts in flight the maximum."""
    choices: list[tuple[int, ...]]
    spans: Numbers
    """[2, drawing rows]: first sample of each row and their number, as `accept` takes them."""
    first: Numbers
    """[drawing rows]: row of logits of each first sample."""

    @classmethod
    def of(
        cls,
        drafts: Mapping[SeqId, SpecTokens],
        sampled_rows: Sequence[StepRow],
        drawing: Numbers | slice,
        rows: StepRows,
        batch: InputBatch,
    ) -> SpecSamples:
        """Return the draws of the rows ``sampled_rows``, which are ``drawing`` among ``rows``."""
        index, ends, lens = rows.index[drawing], rows.ends[drawing], rows.lens[drawing]
        more = [drafts[row.seq].num_tokens if row.seq in drafts else 0 for row in sampled_rows]
        counts = np.array(more, dtype=np.int64) + 1
        behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(counts.sum())
        choices: list[tuple[int, ...]] = []
        first = np.cumsum(counts) - counts
        spans, at = np.ones((2, len(more)), dtype=np.int64), 0
        for place_of_row, (row, count) in enumerate(zip(sampled_rows, more, strict=True)):
            choices += [row.sample_choices] * (1 + count)
            emitted = count > 0 and bool(drafts[row.seq].emitted)
            spans[:, place_of_row] = (at + count, 1) if emitted else (at, 1 + count)
            first[place_of_row] += count * emitted
            at += (1 + count) * len(row.sample_choices)
        return cls(
            tokens=np.repeat(ends, counts) - behind,
            rows=np.repeat(index, counts),
            places=np.repeat(np.arange(len(rows.index))[drawing], counts),
            positions=np.repeat(lens - batch.prompts[index], counts) - behind,
            choices=choices,
            spans=spans,
            first=first,
        )


class RowDrafts:
    """Tokens and drafts by row of the batch."""

    def __init__(
        self,
        proposer: Proposer,
        batch: InputBatch,
        device: torch.device,
        *,
        max_len: int,
        most: int,
    ) -> None:
        """``max_len``: maximum tokens of a sequence; ``most``: maximum drafts."""
        rows = batch.capacity + 1
        self.proposer = proposer
        self._batch, self._device = batch, device
        columns = max_len + MOST_TOKENS
        self.history = TokenHistory(
            torch.zeros(rows, columns, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.full((rows, most), NONE, dtype=torch.int64, device=device),
        )
        self._single = torch.stack((torch.arange(rows), torch.ones(rows).long())).to(device)
        """Spans of rows of one sample."""
        self._earlier: Tensor | None = None
        self.known: Numbers = np.zeros(rows, dtype=np.int64)
        """Tokens of each row that the host knows."""
        self.proposed: dict[int, list[int]] = {}
        """Drafts of rows with rules, on the host."""

    def warm(self, inputs: StepInputs, last_tokens: Tensor, drawn: Drawn) -> None:
        """Load the kernels with a step of padding, of one row."""
        self.place(inputs)
        spare = index_on([self._batch.capacity], self._device)
        self.accept(spare, None, torch.zeros_like(spare), last_tokens, drawn)

    def add(self, row: int, token_ids: Sequence[int]) -> None:
        """Set the tokens of a new row."""
        self.known[row] = len(token_ids)
        tokens = torch.tensor(token_ids, dtype=torch.int32)
        if self._device.type == "cuda":
            tokens = tokens.pin_memory()
        self.history.token_ids[row, : len(token_ids)].copy_(tokens, non_blocking=True)

    def place(self, inputs: StepInputs) -> None:
        """Complete the inputs of a step on the device."""
        assert inputs.tokens is not None, "the stager keeps no rows for a history"
        self._earlier = place(self.history, inputs.tokens)

    def positions(self, places: Numbers, positions: Numbers) -> Tensor:
        """Return the output positions (int64, on the device) of samples whose maxima are
        ``positions``; ``places`` are rows of the padded step."""
        assert self._earlier is not None, "positions are asked of a step without inputs"
        numbers = index_on(np.stack((positions, places)), self._device)
        return numbers[0] - self._earlier.index_select(0, numbers[1])

    def ahead(self, rows: StepRows) -> Numbers:
        """Return by how many tokens each row may begin earlier, as far as the host knows."""
        batch, index = self._batch, rows.index
        drawn_here = rows.first >= batch.lengths[index]
        return np.where(drawn_here, rows.first + 1 - self.known[index], 0)

    def accept(
        self,
        rows: Tensor,
        spans: Numbers | None,
        token_ids: Tensor,
        last_tokens: Tensor,
        drawn: Drawn,
    ) -> tuple[Tensor, Tensor]:
        """Keep the samples of a step and propose. ``spans`` is None if each row has one sample.

        Return, on their way to the host, the results of `accept` and of the proposer (int64 [3,
        rows]) and the drafts (int64 [rows, most]).
        """
        each = self._single[:, : len(rows)] if spans is None else index_on(spans, self._device)
        results = accept(self.history, rows, each, token_ids, last_tokens)
        self.proposer.propose(self.history, rows, results, drawn)
        drafts = self.history.drafts.index_select(0, rows)
        return results.to("cpu", non_blocking=True), drafts.to("cpu", non_blocking=True)

    def note(self, row: int, count: int, proposed: Tensor) -> None:
        """Note ``count`` tokens of a row that reached the host, and the drafts after them."""
        self.known[row] += count
        if row in self._batch.sampling.rules:
            self.proposed[row] = proposed.tolist()

    def rules_ahead(
        self, drafts: Mapping[SeqId, SpecTokens], sampled_rows: Sequence[StepRow]
    ) -> dict[tuple[int, int], RowRules]:
        """Return the rules at each position of rows with drafts: see ``rules_after``."""
        ahead: dict[tuple[int, int], RowRules] = {}
        for step_row in sampled_rows:
            draft, row = drafts.get(step_row.seq), self._batch.row_of[step_row.seq]
            rules = self._batch.sampling.rules.get(row)
            if draft is None or draft.emitted or rules is None or not rules.looks_back:
                continue
            position = int(self.known[row] - self._batch.prompts[row])
            tokens = self.proposed.get(row, [])[: draft.num_tokens]
            ahead |= rules_after(rules, row, position, tokens)
        return ahead


def rules_after(
    rules: RowRules, row: int, position: int, tokens: Sequence[int]
) -> dict[tuple[int, int], RowRules]:
    """Return rules by (row, output position) from ``position`` on, each after one more of
    ``tokens``."""
    ahead = {(row, position): (rules := rules.copy())}
    for at, token in enumerate(tokens, 1):
        rules = rules.copy()
        rules.extend((max(token, 0),))
        ahead[row, position + at] = rules
    return ahead


def rules_before(
    drafts: Mapping[SeqId, SpecTokens], sampled_rows: Sequence[StepRow], batch: InputBatch
) -> dict[tuple[int, int], RowRules]:
    """Return the rules at each position of rows that sample after emitted tokens again."""
    ahead: dict[tuple[int, int], RowRules] = {}
    for step_row in sampled_rows:
        draft, row = drafts.get(step_row.seq), batch.row_of[step_row.seq]
        rules = batch.sampling.rules.get(row)
        if draft is None or not draft.emitted or rules is None or not rules.looks_back:
            continue
        new, count = batch.sequences[step_row.seq], draft.num_tokens
        before = rules.request.of_row(new.ruled_token_ids[new.num_ruled_prompt : -count])
        assert before is not None, "a row has rules whatever its tokens are"
        end = step_row.num_computed + step_row.num_scheduled_tokens
        ahead |= rules_after(before, row, end - count - new.num_prompt, draft.emitted)
    return ahead
