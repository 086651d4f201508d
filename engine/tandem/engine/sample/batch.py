"""Sampling parameters of the batch: a column each, a row per sequence.

Rows are those of the runner's ``InputBatch``. Rarely used parameters are kept by row next to the
columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.logits_processors import LogitsProcessor, ProcessorClasses, ProcessorContext
from tandem.engine.sample.bounds import BoundsStage
from tandem.engine.sample.rules import RequestRules, RowRules, asks
from tandem.engine.sample.transfer import index_on
from tandem.engine.step import SeqId, TokenMasks
from tandem.kernels.sampling import Columns
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams


class RowProcessors:
    """Logits processors, one of each class."""

    def __init__(self, classes: ProcessorClasses, context: ProcessorContext) -> None:
        self._classes = classes
        self._made = {each: each(context) for each in classes.classes}
        self._asked: dict[int, list[LogitsProcessor]] = {}

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        asked = [self._made[each] for each in self._classes.asked_by(params)]
        for each in asked:
            each.add(row, params, prompt, output)
        if asked:
            self._asked[row] = asked

    def remove(self, row: int) -> None:
        """Free the row; a free one may be freed again."""
        for each in self._asked.pop(row, ()):
            each.remove(row)

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        for each in self._asked.get(row, ()):
            if each.looks_back:
                each.extend(row, token_ids)

    def looks_back(self, row: int) -> bool:
        """Return whether one of the row's processors depends on the tokens before a draw."""
        return any(each.looks_back for each in self._asked.get(row, ()))

    def asks(self, row: int, *, keeps_argmax: bool) -> bool:
        return any(each.keeps_argmax is keeps_argmax for each in self._asked.get(row, ()))

    def apply(self, logits: Tensor, rows: Sequence[int], *, keeps_argmax: bool) -> None:
        """Apply all processors of this kind in order, in place on float32 [rows, vocabulary].
        ``rows`` are those of the batch."""
        for each in self._made.values():
            if each.keeps_argmax is not keeps_argmax:
                continue
            at = [i for i, row in enumerate(rows) if each in self._asked.get(row, ())]
            if len(at) == len(rows):
                each.apply(logits, rows)
            elif at:
                index = index_on(at, logits.device)
                part = logits.index_select(0, index)
                each.apply(part, [rows[i] for i in at])
                logits.index_copy_(0, index, part)


_DRAWING_BYTES = 2 * 8 + 3 * 4
"""Bytes of a row in the columns of draws."""
_ALIGNED = 4
"""Multiple of rows in each column, which aligns it to 16 bytes."""


class SamplingKind(IntEnum):
    """Kind of choice of a row's token."""

    GREEDY = 0
    DRAWN = 1
    FILTERED = 2
    """Drawn under min-p, top-k or top-p."""


class SamplingBatch:
    """Parameters of up to ``max_rows`` sequences in CPU tensors by row; a draw's are also on the
    device.

    Row ``max_rows`` is for rows that pad a graph: no filter.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._room = -(-(max_rows + 1) // _ALIGNED) * _ALIGNED
        self._memory = torch.zeros(self._room * _DRAWING_BYTES, dtype=torch.uint8)
        self.drawing = _columns(self._memory, self._room)
        """Columns of a draw; filters that are off are 0, 0 and 1."""
        self.drawing.temperature[max_rows] = self.drawing.top_p[max_rows] = 1.0
        self._there: tuple[Tensor, Columns] | None = None
        """Columns on a device, at an address that graphs may hold."""
        self._changed = True
        self.repetition = torch.ones(max_rows)
        self.frequency = torch.zeros(max_rows)
        self.presence = torch.zeros(max_rows)
        self.kinds: NDArray[np.int8] = np.zeros(max_rows, dtype=np.int8)
        self.rules: dict[int, RowRules] = {}
        """Rows whose logits are changed before the choice."""
        self._latest: RequestRules | None = None
        """Rules of the last row's request, whose choices follow each other; kept while any row has
        rules."""
        self.logprobs: dict[int, int] = {}
        self.masks: dict[int, int] = {}
        """Place of the mask's words by row, for rows with a grammar in this step."""
        self.mask_words = torch.empty(0, 0, dtype=torch.int32)
        """int32 [bounded, words], on the host: see ``TokenMasks``."""
        self.processors: RowProcessors | None = None
        """External logits processors; None if there are none."""
        self.bounds: BoundsStage | None = None
        """Stage of the masks' words on the device; None uses new memory in each step."""
        self.ahead: dict[tuple[int, int], RowRules] = {}
        """Rules after earlier drafts of this step, by row and output position, for rows whose rules
        depend on tokens."""
        columns = (*self.drawing, self.repetition, self.frequency, self.presence)
        self._numbers = tuple(each.numpy() for each in columns)
        """The columns as numpy, which writes a number faster."""

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        token_ids: Sequence[int],
        num_prompt: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Set a row's sequence.

        ``token_ids`` are read, not kept; the output begins at ``num_prompt``. ``eos_token_ids`` are
        held back until ``min_tokens``. Raises InvalidParameter for a draw without seed.
        """
        self.remove(row)
        self._fill(row, params)
        if not params.greedy and params.top_k != 1:
            self._make_random(row, params)
        if asks(params):
            self._add_rules(row, params, token_ids, num_prompt, eos_token_ids)
        if params.logprobs is not None:
            self.logprobs[row] = params.logprobs
        if self.processors is not None:
            self.processors.add(row, params, token_ids[:num_prompt], token_ids[num_prompt:])

    @property
    def is_processed(self) -> bool:
        return bool(self.processors)

    @property
    def follows_tokens(self) -> bool:
        """Return whether any row may need the tokens that were drawn for it."""
        return bool(self.rules or self.processors)

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        rules = self.rules.get(row)
        if rules is not None:
            rules.extend(token_ids)
        if self.processors is not None:
            self.processors.extend(row, token_ids)

    def remove(self, row: int) -> None:
        self.kinds[row] = SamplingKind.GREEDY
        self.rules.pop(row, None)
        if not self.rules:
            self._latest = None
        self.logprobs.pop(row, None)
        if self.processors is not None:
            self.processors.remove(row)

    def mask(self, row_of: Mapping[SeqId, int], masks: TokenMasks | None) -> None:
        """Set the masks of the coming step, which replace the last step's."""
        self.masks = {}
        if masks is not None and masks.seqs:
            self.masks = {row_of[seq]: at for at, seq in enumerate(masks.seqs)}
            words = torch.frombuffer(masks.words, dtype=torch.int32)
            self.mask_words = words.view(len(masks.seqs), -1)
            if self.bounds is not None:
                self.bounds.hold(self.mask_words)

    def needs_tokens(self, row: int) -> bool:
        """Return whether the row's next draw requires all its earlier tokens.

        Other rows may be sampled before their last token is on the host.
        """
        rules = self.rules.get(row)
        if self.processors is not None and self.processors.looks_back(row):
            return True
        return rules is not None and rules.needs_tokens

    def looks_back(self, row: int) -> bool:
        rules = self.rules.get(row)
        if self.processors is not None and self.processors.looks_back(row):
            return True
        return rules is not None and rules.looks_back

    def needs_position(self, row: int, least: int) -> bool:
        """Return whether rules of the row depend on its tokens, or on its output position if it is
        at least ``least``."""
        rules = self.rules.get(row)
        return self.looks_back(row) or (rules is not None and rules.holds_back_end(least))

    def rules_at(self, row: int, position: int) -> RowRules | None:
        rules = self.rules.get(row)
        if self.ahead:
            rules = self.ahead.get((row, position), rules)
        return rules if rules is not None and rules.applies(position) else None

    def edits(self, row: int, position: int) -> bool:
        """Return whether a rule edits the row's logits before the choice at this position."""
        if self.processors is not None and self.processors.asks(row, keeps_argmax=False):
            return True
        return row in self.masks or self.rules_at(row, position) is not None

    def reshapes(self, row: int) -> bool:
        """Return whether processors that keep the argmax change the row's logits."""
        return self.processors is not None and self.processors.asks(row, keeps_argmax=True)

    def drawing_on(self, device: torch.device) -> Columns:
        """Return ``drawing`` on ``device``, copied if rows have changed."""
        if device.type == "cpu":
            return self.drawing
        if self._there is None:
            memory = torch.empty_like(self._memory, device=device)
            self._there = memory, _columns(memory, self._room)
        memory, columns = self._there
        if self._changed:
            # From new pinned memory: this batch may change before the copy is made.
            memory.copy_(self._memory.pin_memory(), non_blocking=True)
            self._changed = False
        return columns

    def _fill(self, row: int, params: SamplingParams) -> None:
        self._changed = True
        seeds, top_k, temperature, min_p, top_p, repetition, frequency, presence = self._numbers
        seeds[row] = params.seed or 0
        top_k[row] = max(params.top_k, 0)
        temperature[row] = params.temperature
        min_p[row] = params.min_p
        top_p[row] = params.top_p
        repetition[row] = params.repetition_penalty
        frequency[row] = params.frequency_penalty
        presence[row] = params.presence_penalty

    def _add_rules(
        self,
        row: int,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_prompt: int,
        eos_token_ids: Collection[int],
    ) -> None:
        prompt, output = token_ids[:num_prompt], token_ids[num_prompt:]
        request = self._latest
        if request is None or not request.are_of(params, prompt, eos_token_ids):
            request = RequestRules.of(params, prompt, eos_token_ids)
        rules = request.of_row(output)
        if rules is not None:
            self.rules[row], self._latest = rules, request

    def _make_random(self, row: int, params: SamplingParams) -> None:
        """Set the kind of a row that draws. Top-k 1 is not a draw, so that the lowest id wins a
        tie."""
        if not params.has_seed:
            raise InvalidParameter(
                "seed", params.seed, "an integer, set when a request is admitted"
            )
        filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.kinds[row] = SamplingKind.FILTERED if filtered else SamplingKind.DRAWN


def _columns(memory: Tensor, rows: int) -> Columns:
    wide = memory[: rows * 16].view(torch.int64).view(2, rows)
    narrow = memory[rows * 16 :].view(torch.float32).view(3, rows)
    return Columns(*wide, *narrow)
