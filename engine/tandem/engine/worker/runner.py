"""One step on one rank: plan → inputs → forward → logits → tokens.

Holds no policy: what is computed is the plan's, how attention runs is the backend's, how tokens are
drawn is the sampler's. It appends the tokens that it drew to its own rows, so that the next plan
may be made before anybody has read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.attention import AttentionBackend
from tandem.engine.models import CausalModel, StepContext
from tandem.engine.sample import Sampler, prompt_logprobs
from tandem.engine.scheduler.output import (
    FenceDone,
    ModelRunnerOutput,
    Sampled,
    SchedulerOutput,
    SeqId,
    StepRow,
)
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.inputs import StepInputs, make_inputs
from tandem.engine.worker.slab import Slab
from tandem.engine.worker.threads import StepThreads
from tandem.kernels.blocks import copy
from tandem.protocol.outputs import TokenLogprobs

PROMPT_LOGPROB_ROWS = 128
"""Positions whose logits exist at a time when a prompt is scored."""


class _Scored(NamedTuple):
    """A row's prompt positions of this step whose next token is to be scored."""

    row: StepRow
    first: int
    """Its first token among the step's."""
    length: int
    """How many; the last prompt token predicts no prompt token."""


@dataclass(slots=True)
class ModelRunner:
    """Runs steps over one model and one slab."""

    model: CausalModel
    attention: AttentionBackend
    slab: Slab
    batch: InputBatch
    sampler: Sampler
    device: torch.device
    threads: StepThreads

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the step and draw its tokens; the rows keep them."""
        self.batch.apply(plan)
        self._copy_blocks(plan.block_copies)
        if not plan.rows:
            return ModelRunnerOutput(step=plan.step, sampled=(), fence=FenceDone())
        self.threads.set_for(plan.num_tokens)
        inputs = make_inputs(plan.rows, self.batch, self.device)
        drawing = [i for i, row in enumerate(plan.rows) if row.sample_choices]
        scored = list(self._to_score(plan.rows, inputs.query_start))
        hidden = self._forward(inputs, drawing, scored)
        sampled = self._draw(plan.rows, drawing, hidden[: len(drawing)])
        return ModelRunnerOutput(
            step=plan.step,
            sampled=sampled,
            fence=FenceDone(),
            prompt_logprobs=self._score(scored, hidden[len(drawing) :]),
        )

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            source, to = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
            copy(self.slab.blocks, source, to)

    def _forward(
        self, inputs: StepInputs, drawing: Sequence[int], scored: Sequence[_Scored]
    ) -> Tensor:
        """Hidden states of the rows' last tokens, then of the positions to score."""
        step = StepContext(
            rotation=self.model.rotary(inputs.positions),
            slots=inputs.slots,
            attention=self.attention,
            metadata=self.attention.plan(inputs.sequences),
            kv=self.slab.layers,
        )
        wanted = [inputs.query_start[i + 1] - 1 for i in drawing]
        for each in scored:
            wanted += range(each.first, each.first + each.length)
        every = wanted == list(range(inputs.query_start[-1]))
        rows = None if every else torch.tensor(wanted, dtype=torch.int64, device=self.device)
        return self.model.forward(inputs.token_ids, step, rows)

    def _draw(
        self, rows: Sequence[StepRow], drawing: Sequence[int], hidden: Tensor
    ) -> tuple[Sampled, ...]:
        if not drawing:
            return ()
        chosen = [rows[i] for i in drawing]
        known = [self.batch.sequences[row.seq] for row in chosen]
        out = self.sampler.sample(
            self.model.logits(hidden),
            self.batch.sampling,
            rows=[self.batch.row_of[row.seq] for row in chosen],
            positions=[
                row.num_computed + row.num_tokens - seq.num_prompt
                for row, seq in zip(chosen, known, strict=True)
            ],
            choices=[row.sample_choices for row in chosen],
        )
        scores = {} if out.logprobs is None else out.logprobs.by_draw()
        tokens = out.token_ids.tolist()
        sampled = []
        at = 0
        for row, seq in zip(chosen, known, strict=True):
            end = at + len(row.sample_choices)
            sampled.append(_sampled(row, tokens[at:end], [scores.get(i) for i in range(at, end)]))
            if seq.choice in row.sample_choices:
                self.batch.append(row.seq, tokens[at + row.sample_choices.index(seq.choice)])
            at = end
        return tuple(sampled)

    def _to_score(self, rows: Sequence[StepRow], query_start: Sequence[int]) -> Iterator[_Scored]:
        for row, start in zip(rows, query_start, strict=False):
            seq = self.batch.sequences[row.seq]
            if seq.params.prompt_logprobs is not None:
                count = (
                    min(row.num_computed + row.num_tokens, seq.num_prompt - 1) - row.num_computed
                )
                if count > 0:
                    yield _Scored(row, start, count)

    def _score(
        self, scored: Sequence[_Scored], hidden: Tensor
    ) -> dict[SeqId, tuple[TokenLogprobs, ...]]:
        out = {}
        at = 0
        for each in scored:
            out[each.row.seq] = tuple(self._score_one(each, hidden[at : at + each.length]))
            at += each.length
        return out

    def _score_one(self, each: _Scored, hidden: Tensor) -> Iterator[TokenLogprobs]:
        seq = self.batch.sequences[each.row.seq]
        first = each.row.num_computed + 1
        following = seq.token_ids[first : first + each.length]
        assert seq.params.prompt_logprobs is not None
        for at in range(0, each.length, PROMPT_LOGPROB_ROWS):
            part = slice(at, at + PROMPT_LOGPROB_ROWS)
            logits = self.model.logits(hidden[part])
            yield from prompt_logprobs(logits, following[part], seq.params.prompt_logprobs)


def _sampled(
    row: StepRow, tokens: Sequence[int], scores: Sequence[TokenLogprobs | None]
) -> Sampled:
    logprobs = tuple((score,) for score in scores if score is not None)
    return Sampled(
        seq=row.seq,
        choices=row.sample_choices,
        token_ids=tuple((token,) for token in tokens),
        logprobs=logprobs or None,
    )
