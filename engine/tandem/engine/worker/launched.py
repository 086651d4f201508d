"""A launched step, whose samples are copied to pinned memory and read on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.engine.sample import LogprobTensors
from tandem.engine.step import (
    DraftSampled,
    ModelRunnerOutput,
    Sampled,
    SeqId,
    SpecTokens,
    StepRow,
)
from tandem.engine.worker.device_events import PAST, WAIT_SECONDS, Both, DeviceEvent
from tandem.engine.worker.medium import BlockMedium
from tandem.engine.worker.pooling import PooledStep
from tandem.protocol.kv import Fence
from tandem.protocol.outputs import TokenLogprobs


@dataclass(slots=True)
class LaunchedStep:
    """One step in flight. ``wait_tokens`` may be called early, if a step requires tokens."""

    step: int
    moment: DeviceEvent = PAST
    """Event after all of its writes and copies, once they are queued."""
    written: DeviceEvent | None = None
    """Event after the KV of a step with prompts, before the head; None: as ``moment``."""
    before_last_layers: DeviceEvent | None = None
    """Event some ms earlier, between two layers of such a step; None: as ``written``."""
    stored: DeviceEvent | None = None
    """Event after all stores to host memory so far; None: as ``moment``."""
    sampled_rows: Sequence[StepRow] = ()
    tokens: Tensor | None = None
    """int64 [draws] on the host."""
    logprobs: LogprobTensors | None = None
    prompts: dict[SeqId, list[LogprobTensors]] = field(default_factory=dict)
    """Scores of prompt positions, part by part."""
    pooled: PooledStep | None = None
    """Results of the pooled prompts that end here."""
    note: Callable[[SeqId, Sequence[int], Tensor | None], None] | None = None
    """Called for each row with the tokens that extend its output and the drafts proposed after
    them, once these are on the host; None if nothing depends on them."""
    host: BlockMedium | None = None
    """Blocks in host memory whose loads the result reports."""
    for_transfers: bool = False
    """Whether the step has only transfers: its result waits for all of them."""
    drafts: Mapping[SeqId, SpecTokens] = field(default_factory=dict)
    """Rows that also sample at earlier positions."""
    results: Tensor | None = None
    """int64 [3, sampled rows] on the host, of `accept` and `lookup`; None without a history."""
    proposed: Tensor | None = None
    """int64 [sampled rows, most drafts] on the host: drafts for the next step."""
    awaits_masks: bool = False
    """Whether nothing is sampled yet."""
    late: frozenset[SeqId] = frozenset()
    """Sequences without masks, whose samples are discarded."""
    _known: list[int] | None = None
    _numbers: list[list[int]] = field(default_factory=list)
    """``results``, once known."""

    @property
    def fence(self) -> Fence:
        """Return the fence of its writes and of all stores so far, for writers outside of steps."""
        return self.moment if self.stored is None else Both(self.moment, self.stored)

    def wait_nearly(self, seconds: float = WAIT_SECONDS) -> DeviceEvent:
        """Return the event after all KV of the step, once it is near. Raises TimeoutError."""
        written = self.written or self.moment
        (self.before_last_layers or written).wait(seconds)
        return written

    @torch.inference_mode()
    def wait_tokens(self, seconds: float = WAIT_SECONDS) -> list[int]:
        """Wait for the sampled tokens and return them. Raises TimeoutError."""
        if self._known is None:
            assert not self.awaits_masks, "a step is asked for tokens before it draws"
            self.moment.wait(seconds)
            self._known = [] if self.tokens is None else self.tokens.tolist()
            self._numbers = [] if self.results is None else self.results.tolist()
            self._note_tokens(self._known)
        return self._known

    def result(self, seconds: float = WAIT_SECONDS) -> ModelRunnerOutput:
        """Wait for the step's result and return it. Raises TimeoutError."""
        tokens = self.wait_tokens(seconds)
        if self.for_transfers and self.stored is not None:
            self.stored.wait(seconds)
        transfers = None
        if self.host is not None:
            transfers = self.host.report(wait=self.for_transfers, seconds=seconds)
        return ModelRunnerOutput(
            step=self.step,
            sampled=tuple(self._sampled(tokens)),
            drafted=tuple(self._drafted(tokens)),
            fence=self.fence,
            prompt_logprobs={
                seq: tuple(score for part in parts for score in part.as_list())
                for seq, parts in self.prompts.items()
            },
            transfers=transfers,
            pooled={} if self.pooled is None else self.pooled.as_bytes(),
            num_proposed=dict(self._num_proposed()),
        )

    def _note_tokens(self, tokens: list[int]) -> None:
        if self.note is None:
            return
        for number, (row, at, end) in enumerate(self._spans()):
            if row.seq not in self.late:
                drafts = None if self.proposed is None else self.proposed[number]
                self.note(row.seq, self._kept(number, tokens[at:end]), drafts)

    def _kept(self, number: int, sampled: Sequence[int]) -> Sequence[int]:
        """Return the samples that extend the output of a row."""
        draft = self.drafts.get(self.sampled_rows[number].seq)
        if draft is None:
            return sampled[:1]
        if draft.emitted:
            return sampled[-1:]
        return sampled[: self._numbers[0][number] + 1]

    def _num_proposed(self) -> Iterator[tuple[SeqId, int]]:
        for row, count in zip(
            self.sampled_rows, self._numbers[2] if self._numbers else (), strict=False
        ):
            if row.seq not in self.late:
                yield row.seq, count

    def _spans(self) -> Iterator[tuple[StepRow, int, int]]:
        at = 0
        for row in self.sampled_rows:
            end = at + len(row.sample_choices)
            if row.seq in self.drafts:
                end += self.drafts[row.seq].num_tokens
            yield row, at, end
            at = end

    def _scores(self) -> dict[int, TokenLogprobs]:
        return {} if self.logprobs is None else self.logprobs.by_draw()

    def _drafted(self, tokens: list[int]) -> Iterator[DraftSampled]:
        if not self.drafts:
            return
        scores = self._scores()
        for number, (row, at, end) in enumerate(self._spans()):
            draft = self.drafts.get(row.seq)
            if draft is None:
                continue
            kept = tuple(self._kept(number, tokens[at:end]))
            first = end - 1 if draft.emitted else at
            logprobs = tuple(scores[i] for i in range(first, first + len(kept)) if i in scores)
            sampled = Sampled(
                row.seq, row.sample_choices, (kept,), (logprobs,) if logprobs else None
            )
            if draft.emitted:
                replayed = tuple(tokens[at : end - 1])
                yield DraftSampled(sampled, draft.num_tokens, replayed=replayed)
            else:
                yield DraftSampled(sampled, draft.num_tokens, self._numbers[1][number])

    def _sampled(self, tokens: list[int]) -> list[Sampled]:
        if self.logprobs is None and len(tokens) == len(self.sampled_rows) and not self.late:
            return [
                Sampled(row.seq, row.sample_choices, ((token,),))
                for row, token in zip(self.sampled_rows, tokens, strict=True)
            ]
        scores = self._scores()
        sampled = []
        for row, at, end in self._spans():
            if row.seq not in self.drafts and row.seq not in self.late:
                logprobs = _logprobs_of([scores.get(i) for i in range(at, end)])
                ids = tuple((token,) for token in tokens[at:end])
                sampled.append(Sampled(row.seq, row.sample_choices, ids, logprobs))
        return sampled


def _logprobs_of(
    scores: Sequence[TokenLogprobs | None],
) -> tuple[tuple[TokenLogprobs, ...], ...] | None:
    return tuple((score,) for score in scores if score is not None) or None
