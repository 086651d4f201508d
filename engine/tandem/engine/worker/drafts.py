"""Samples of a step in which rows carry drafts: several of one row, one position each.

Such a step is run without a graph: graphs with chunks give only the last position of each row, and
those of decodes one token a row. The token by which a row continues is found on the device, so that
nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.sample.rules import RowRules
from tandem.engine.sample.transfer import index_on
from tandem.engine.step import RowDraft, SeqId, StepRow
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.rows import StepRows

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class DraftDraws:
    """Rows of logits of a step in which some rows have several; arrays are parallel."""

    tokens: Numbers
    """Token of the unpadded step after which each row of logits samples."""
    rows: Numbers
    """Row of the batch."""
    positions: Numbers
    """Output position that each is sampled for."""
    choices: list[tuple[int, ...]]
    going_on: list[int]
    """Sample by which each drawing row continues: its first, or of forced drafts its last."""
    proposed: list[tuple[int, int, tuple[int, ...]]]
    """(place among the drawing rows, first sample, drafts) of drafts that the samples accept."""

    @classmethod
    def of(
        cls,
        drafts: Mapping[SeqId, RowDraft],
        drawn: Sequence[StepRow],
        drawing: NDArray[np.int64] | slice,
        rows: StepRows,
        batch: InputBatch,
    ) -> DraftDraws:
        """Return the draws of the rows ``drawn``, which are ``drawing`` among ``rows``."""
        index, ends, lens = rows.index[drawing], rows.ends[drawing], rows.lens[drawing]
        more = [len(drafts[row.seq].draft_token_ids) if row.seq in drafts else 0 for row in drawn]
        counts = np.array(more, dtype=np.int64) + 1
        behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(counts.sum())
        choices: list[tuple[int, ...]] = []
        going_on, proposed, at = [], [], 0
        for place, (row, count) in enumerate(zip(drawn, more, strict=True)):
            choices += [row.sample_choices] * (1 + count)
            forced = count > 0 and drafts[row.seq].forced
            going_on.append(at + count if forced else at)
            if count and not forced:
                proposed.append((place, at, drafts[row.seq].draft_token_ids))
            at += (1 + count) * len(row.sample_choices)
        return cls(
            tokens=np.repeat(ends, counts) - behind,
            rows=np.repeat(index, counts),
            positions=np.repeat(lens - batch.prompts[index], counts) - behind,
            choices=choices,
            going_on=going_on,
            proposed=proposed,
        )

    def last_tokens(self, token_ids: Tensor) -> Tensor:
        """Return int64 [drawing rows]: the sampled token by which each continues."""
        device = token_ids.device
        last = token_ids[index_on(self.going_on, device)]
        if self.proposed:
            places, first, drafts = zip(*self.proposed, strict=True)
            most = max(map(len, drafts))
            wanted = np.full((len(drafts), most), -1, dtype=np.int64)
            for at, tokens in enumerate(drafts):
                wanted[at, : len(tokens)] = tokens
            # Behind a row's last draw those of others stand, whom its -1 never lets count.
            within = np.minimum(np.array(first)[:, None] + np.arange(most + 1), len(token_ids) - 1)
            drawn = token_ids[index_on(within, device)]
            same = drawn[:, :-1] == index_on(wanted, device)
            accepted = same.long().cumprod(1).sum(1, keepdim=True)
            last.index_copy_(0, index_on(places, device), drawn.gather(1, accepted).squeeze(1))
        return last


def put_proposed(
    drafts: Mapping[SeqId, RowDraft], rows: Sequence[StepRow], batch: InputBatch
) -> None:
    """Write proposed drafts, which ranks do not know, into the batch's tokens for the step."""
    for row in rows:
        draft = drafts.get(row.seq)
        if draft is not None and not draft.forced:
            batch.put_drafts(batch.row_of[row.seq], row.num_computed + 1, draft.draft_token_ids)


def rules_ahead(
    drafts: Mapping[SeqId, RowDraft], drawn: Sequence[StepRow], batch: InputBatch
) -> dict[tuple[int, int], RowRules]:
    """Return the rules of rows that look back at their tokens, at each of their positions: see
    ``SamplingBatch.ahead``. Every token before the step is known to ``batch``."""
    ahead = {}
    for step_row in drawn:
        draft, row = drafts.get(step_row.seq), batch.row_of[step_row.seq]
        rules = batch.sampling.rules.get(row)
        if draft is None or rules is None or not rules.looks_back:
            continue
        new, tokens = batch.sequences[step_row.seq], draft.draft_token_ids
        if draft.forced:
            output = new.ruled_token_ids[new.num_ruled_prompt : -len(tokens)]
            before = rules.request.of_row(output)
            assert before is not None, "a row has rules whatever its tokens are"
            rules = before
        position = step_row.num_computed + step_row.num_tokens - len(tokens) - new.num_prompt
        ahead[row, position] = rules = rules.copy()
        for at, token in enumerate(tokens, 1):
            rules = rules.copy()
            rules.extend((token,))
            ahead[row, position + at] = rules
    return ahead
