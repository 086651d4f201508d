"""External logits processors of a rank's rows, and their calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.engine.logits_processors import LogitsProcessor, ProcessorClasses, ProcessorContext
from tandem.engine.sample.transfer import index_on
from tandem.protocol.sampling import SamplingParams


class RowProcessors:
    """Logits processors, one of each class; rows without any cost nothing."""

    def __init__(self, classes: ProcessorClasses, context: ProcessorContext) -> None:
        self._classes = classes
        self._made = {each: each(context) for each in classes.classes}
        self._asked: dict[int, list[LogitsProcessor]] = {}

    def __bool__(self) -> bool:
        """Return whether any row has a processor."""
        return bool(self._asked)

    def add(
        self, row: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Add a sequence in a free row."""
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
        """Pass new tokens to the processors that depend on them."""
        for each in self._asked.get(row, ()):
            if each.looks_back:
                each.extend(row, token_ids)

    def looks_back(self, row: int) -> bool:
        """Return whether one of the row's processors depends on the tokens before a draw."""
        return any(each.looks_back for each in self._asked.get(row, ()))

    def asks(self, row: int, *, keeps_argmax: bool) -> bool:
        """Return whether the row has a processor of this kind."""
        return any(each.keeps_argmax is keeps_argmax for each in self._asked.get(row, ()))

    def apply(self, logits: Tensor, rows: Sequence[int], *, keeps_argmax: bool) -> None:
        """Apply all processors of this kind, in the order in which they were named, in place on
        float32 [rows, vocabulary]; ``rows`` are those of the batch."""
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
