"""One step on one rank: plan, inputs, forward, logits, tokens, launched without waiting.

Sampled tokens stay on the device, so that the next step may be launched before the host reads them.
Only rows whose rules look back (penalties, bad words) wait for the step before.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.attention import AttentionBackend
from tandem.engine.models import (
    CausalModel,
    EmbeddedTokens,
    LastLayersQueued,
    StagedVectors,
    StepContext,
)
from tandem.engine.sample import (
    LogprobTensors,
    Sampler,
    SamplerOutput,
    SamplingKind,
    score_prompt,
)
from tandem.engine.sample.bounds import Bounds
from tandem.engine.sample.edits import bounded_rows
from tandem.engine.sample.transfer import index_on
from tandem.engine.step import (
    BlockTransfers,
    SchedulerOutput,
    SeqId,
    StepRow,
    TokenMasks,
)
from tandem.engine.threads import StepThreads
from tandem.engine.worker.device_events import DeviceEvent, moment
from tandem.engine.worker.drafts import Drawn, RowDrafts, SpecSamples, rules_before
from tandem.engine.worker.graphs import SamplerGraphs, StepGraphs
from tandem.engine.worker.input_batch import InputBatch
from tandem.engine.worker.inputs import Fit, StepInputs, StepStager, unpadded
from tandem.engine.worker.kv_cache import KVCacheMemory
from tandem.engine.worker.launched import LaunchedStep
from tandem.engine.worker.medium import BlockMedium
from tandem.engine.worker.offload import blocks_written
from tandem.engine.worker.pooling import PoolingMetadata
from tandem.engine.worker.staging import StepShape
from tandem.engine.worker.step_rows import StepRows
from tandem.engine.worker.vectors import VectorStage
from tandem.kernels.blocks import copy

Numbers = NDArray[np.int64]


PROMPT_LOGPROB_ROWS = 128
"""Positions per pass over the logits while a prompt is scored, which bounds memory."""
_NOTHING = BlockTransfers()


class _Scored(NamedTuple):
    """A row's prompt positions of this step whose next token is to be scored."""

    row: StepRow
    first: int
    """Index of the row's first token among the step's."""
    length: int
    """Number of positions; the last prompt token predicts no prompt token."""


class _Computed(NamedTuple):
    """A step whose forward is queued, and the data for its samples."""

    launched: LaunchedStep
    rows: StepRows
    drawing: NDArray[np.int64] | slice
    """Rows that sample."""
    inputs: StepInputs
    hidden: Tensor
    """Hidden states of the sampled positions, then of those that are scored or pooled."""
    scored: list[_Scored]
    pooled: PoolingMetadata | None
    drafted: SpecSamples | None


@dataclass(slots=True)
class ModelRunner:
    """Runs steps over one model and one KV cache."""

    model: CausalModel
    attention: AttentionBackend
    kv_cache: KVCacheMemory
    batch: InputBatch
    sampler: Sampler
    stager: StepStager
    threads: StepThreads
    graphs: StepGraphs = field(default_factory=StepGraphs)
    choices: SamplerGraphs = field(default_factory=SamplerGraphs)
    host: BlockMedium | None = None
    drafts: RowDrafts | None = None
    """Tokens and drafts on the device; None if none are proposed."""
    vectors: VectorStage | None = None
    """Prompt vectors of graphs; None if prompts are ids."""
    _last: LaunchedStep | None = None
    _computed: _Computed | None = None
    """The step that awaits its masks."""

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Queue the step on the device. Wait only if the rules of a row require earlier tokens."""
        self.batch.apply(plan)
        if self.drafts is not None:
            for new in plan.new:
                self.drafts.add(self.batch.row_of[new.seq], new.token_ids)
        stored = self._move_blocks(plan)
        self._copy_blocks(plan.block_copies)
        noted = self.batch.sampling.follows_tokens or self.drafts is not None
        launched = LaunchedStep(plan.step, note=self._note_tokens if noted else None)
        launched.host, launched.for_transfers = self.host, not plan.rows
        launched.stored = stored
        computed = self._compute(plan, launched) if plan.rows else None
        if plan.awaits_masks:
            launched.awaits_masks, self._computed = True, computed
        else:
            self._finish(launched, computed)
        return launched

    @torch.inference_mode()
    def draw(self, masks: TokenMasks) -> None:
        """Queue the samples of the step that awaits these masks. Rows without a mask keep their
        last token."""
        computed, self._computed = self._computed, None
        assert computed is not None, "no step awaits masks"
        launched = computed.launched
        assert launched.step == masks.step, f"masks of step {masks.step} for {launched.step}"
        sampling, row_of = self.batch.sampling, self.batch.row_of
        launched.late = frozenset(masks.late)
        kept = None
        if masks.late:
            rows = index_on([row_of[seq] for seq in masks.late], self.stager.device)
            kept = rows, self.stager.staging.last_tokens[rows]
        sampling.mask(row_of, masks)
        self._finish(launched, computed)
        sampling.mask(row_of, None)
        if kept is not None:
            self.stager.staging.last_tokens.index_copy_(0, *kept)
        launched.awaits_masks = False

    def hidden(
        self,
        inputs: StepInputs,
        more: Sequence[object] = (),
        on_last_layers: LastLayersQueued | None = None,
    ) -> Tensor:
        """Write the step's KV; return hidden states [num_logits, hidden] after the last norm.
        ``more``: inputs in addition to tokens."""
        staged = self._staged_vectors(inputs)
        step = StepContext(
            rotaries=self.model.rotaries,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            attention=self.attention,
            sequences=inputs.sequences,
            kv=self.kv_cache.layers,
            kv_scales=self.kv_cache.scales,
            inputs=more if staged is None else (staged,),
            on_last_layers=on_last_layers,
        )
        return self.model.forward(self.stager.token_ids(inputs), step, inputs.logits_indices)

    def _staged_vectors(self, inputs: StepInputs) -> StagedVectors | None:
        """Return the vectors that a graph reads: those of its chunks."""
        if self.vectors is None or not (inputs.padded and inputs.shape.chunks):
            return None
        return self.vectors.of(inputs.shape.tokens)

    def _compute(self, plan: SchedulerOutput, launched: LaunchedStep) -> _Computed:
        rows = StepRows.of(plan.rows, self.batch.row_of, drafted=bool(plan.drafts))
        self.threads.set_for(rows.num_tokens)
        launched.sampled_rows = [row for row in plan.rows if row.sample_choices]
        drawing: NDArray[np.int64] | slice = slice(None)
        if len(launched.sampled_rows) < len(plan.rows):
            drawing = np.flatnonzero([bool(row.sample_choices) for row in plan.rows])
        scored = list(self._to_score(plan.rows, rows)) if self.batch.scoring else []
        pooled = self.batch.poolers.metadata(rows) if self.batch.poolers else None
        more = [np.arange(each.first, each.first + each.length) for each in scored]
        if pooled is not None:
            more.append(pooled.tokens)
        drafted = None
        if plan.drafts:
            launched.drafts = {each.seq: each for each in plan.drafts}
            drafted = SpecSamples.of(
                launched.drafts, launched.sampled_rows, drawing, rows, self.batch
            )
        on_last_layers = None
        if rows.shape.chunks:
            on_last_layers = LastLayersQueued(
                rows.layers_left, partial(self._note_before_last_layers, launched)
            )
        hidden, inputs = self._forward(rows, drawing, more, drafted, on_last_layers)
        if rows.shape.chunks:
            launched.written = moment(self.stager.device)
        return _Computed(launched, rows, drawing, inputs, hidden, scored, pooled, drafted)

    def _note_before_last_layers(self, launched: LaunchedStep) -> None:
        launched.before_last_layers = moment(self.stager.device)

    def _finish(self, launched: LaunchedStep, computed: _Computed | None) -> None:
        if computed is not None:
            self._draw_all(computed)
        launched.moment = moment(self.stager.device)
        self._last = launched

    def _draw_all(self, computed: _Computed) -> None:
        launched, rows, drawing, inputs, hidden, scored, pooled, drafted = computed
        draws = len(launched.sampled_rows) if drafted is None else len(drafted.rows)
        kind = self._alike(rows, inputs)
        wanted = hidden[:draws]
        if kind is not None:
            self._draw_alike(launched, rows, inputs, kind, wanted)
        elif launched.sampled_rows:
            if drafted is None:
                self._draw(launched, rows, drawing, wanted, inputs)
            else:
                self._draw_drafted(launched, rows, drafted, wanted, inputs)
        if scored:
            launched.prompts = self._score(scored, hidden[draws:])
        if pooled is not None:
            own = hidden[len(hidden) - len(pooled.tokens) :]
            launched.pooled = self.batch.poolers.pool(pooled, own, self.model)

    def _forward(
        self,
        rows: StepRows,
        drawing: NDArray[np.int64] | slice,
        more: Sequence[NDArray[np.int64]],
        drafted: SpecSamples | None,
        on_last_layers: LastLayersQueued | None,
    ) -> tuple[Tensor, StepInputs]:
        indices: NDArray[np.int64] | None
        if drafted is not None:
            indices = drafted.tokens
        elif isinstance(drawing, slice):
            indices = rows.ends if rows.shape.chunks else None
        else:
            indices = rows.ends[drawing]
        if indices is not None and more:
            indices = np.concatenate((indices, *more))
        device = self.stager.device
        found = (each.of_step(rows, self.model, device) for each in self.batch.inputs)
        given = [each for each in found if each is not None]
        whole = not self.stager.whole and (drafted is not None or bool(more))
        fit: Fit = partial(self.graphs.fit, whole=whole)
        vectors = [each for each in given if isinstance(each, EmbeddedTokens)]
        staged = self.vectors is not None and rows.shape.chunks and len(vectors) == len(given)
        if given and not staged:
            fit = unpadded
        inputs = self.stager.stage(rows, indices, rows.index[drawing], fit)
        if self.drafts is not None:
            self.drafts.place(inputs)
        if inputs.padded:
            if self.vectors is not None:
                padding = max(0, inputs.shape.decodes - rows.num_decodes)
                self.vectors.fill([each.padded(rows.num_decodes, padding) for each in vectors])
            hidden = self.graphs.replay(inputs.shape)
        else:
            hidden = self.hidden(inputs, given, on_last_layers)
        return (hidden if inputs.kept is None else hidden[inputs.kept]), inputs

    def choose(
        self, shape: StepShape, kind: SamplingKind, hidden: Tensor, bounds: Bounds | None
    ) -> Tensor:
        """Sample a token for each row of a graph's decodes of one kind, and keep it as the last
        one; return int64 [decodes]."""
        draws, device = self.stager.draws(shape), self.stager.device
        columns = self.batch.sampling.drawing_on(device)
        logits = self.model.logits(hidden)
        if bounds is not None:
            bounds.keep(logits[:, : self.sampler.vocab_size])
        tokens = self.sampler.choose_alike(logits, kind, columns, draws)
        self.stager.staging.last_tokens.index_copy_(0, draws[0], tokens)
        return tokens

    def _alike(self, rows: StepRows, inputs: StepInputs) -> SamplingKind | None:
        sampling = self.batch.sampling
        if rows.choices is None or not (inputs.padded and self.choices.has(inputs.shape)):
            return None
        if sampling.rules or sampling.logprobs or sampling.is_processed:
            return None
        kinds = sampling.kinds[rows.index]
        return SamplingKind(kinds[0]) if (kinds == kinds[0]).all() else None

    def _draw_alike(
        self,
        launched: LaunchedStep,
        rows: StepRows,
        inputs: StepInputs,
        kind: SamplingKind,
        hidden: Tensor,
    ) -> None:
        sampling, device = self.batch.sampling, self.stager.device
        bounded = bool(sampling.masks)
        if kind is not SamplingKind.GREEDY:
            sampling.drawing_on(device)
        if bounded:
            assert sampling.bounds is not None, "choices are captured together with it"
            sampling.bounds.put(*bounded_rows(sampling, rows.index.tolist()))
        tokens = self.choices.replay(inputs.shape, kind, bounded=bounded)
        tokens = tokens[: len(launched.sampled_rows)]
        if self.drafts is not None:
            drawn = Drawn(self.model, hidden)
            self._accept(self.drafts, launched, tokens, inputs.targets, None, drawn)
        launched.tokens = tokens.to("cpu", non_blocking=True)

    def _draw(
        self,
        launched: LaunchedStep,
        rows: StepRows,
        drawing: Numbers | slice,
        hidden: Tensor,
        inputs: StepInputs,
    ) -> None:
        index, drawn_at = rows.index[drawing], None
        positions = rows.lens[drawing] - self.batch.prompts[index]
        if self.drafts is None:
            self._await_tokens_of(index, self.batch.sampling.needs_tokens)
        else:
            places = np.arange(len(rows.index))[drawing]
            drawn_at = self._drawn_at(self.drafts, rows, places, positions, inputs.shape)
            positions = self._known_positions(self.drafts, rows, places, positions)
        out = self.sampler.sample(
            self.model.logits(hidden),
            self.batch.sampling,
            rows=index,
            positions=positions,
            choices=[row.sample_choices for row in launched.sampled_rows],
            drawn_at=drawn_at,
        )
        spans = None
        if len(out.token_ids) > len(index):
            first = np.fromiter(_first_draws(launched.sampled_rows), dtype=np.int64)
            spans = np.stack((first, np.ones_like(first)))
        self._keep(launched, out, inputs.targets, spans, Drawn(self.model, hidden))

    def _draw_drafted(
        self,
        launched: LaunchedStep,
        rows: StepRows,
        drafted: SpecSamples,
        hidden: Tensor,
        inputs: StepInputs,
    ) -> None:
        """Sample each row at all positions of its ``SpecTokens``."""
        sampling, positions, drawn_at = self.batch.sampling, drafted.positions, None
        if self.drafts is None:
            # After an emitted token, a row may need more tokens than for its next draw.
            self._await_tokens_of(drafted.rows, sampling.looks_back)
        else:
            drawn_at = self._drawn_at(self.drafts, rows, drafted.places, positions, inputs.shape)
            positions = self._known_positions(self.drafts, rows, drafted.places, positions)
        if sampling.rules:
            sampling.ahead = rules_before(launched.drafts, launched.sampled_rows, self.batch)
            if self.drafts is not None:
                sampling.ahead |= self.drafts.rules_ahead(launched.drafts, launched.sampled_rows)
        out = self.sampler.sample(
            self.model.logits(hidden),
            sampling,
            rows=drafted.rows,
            positions=positions,
            choices=drafted.choices,
            drawn_at=drawn_at,
        )
        sampling.ahead = {}
        drawn = Drawn(self.model, hidden, drafted.first)
        self._keep(launched, out, inputs.targets, drafted.spans, drawn)

    def _drawn_at(
        self,
        drafts: RowDrafts,
        rows: StepRows,
        places: Numbers,
        positions: Numbers,
        shape: StepShape,
    ) -> Tensor:
        """Return the output positions of samples on the device; ``places`` are rows of the plan."""
        padding = max(0, shape.decodes - rows.num_decodes)
        padded = places + padding * (places >= rows.num_decodes)
        return drafts.positions(padded, positions)

    def _known_positions(
        self, drafts: RowDrafts, rows: StepRows, places: Numbers, positions: Numbers
    ) -> Numbers:
        """Return the output positions of samples, exact if a row's rules depend on them, after the
        result of the step before."""
        sampling = self.batch.sampling
        if not sampling.follows_tokens:
            return positions
        least = positions - drafts.ahead(rows)[places]
        index = rows.index[places].tolist()
        if self._last is None or not any(map(sampling.needs_position, index, least.tolist())):
            return least
        self._last.wait_tokens()
        return positions - drafts.ahead(rows)[places]

    def _keep(
        self,
        launched: LaunchedStep,
        out: SamplerOutput,
        targets: Tensor,
        spans: Numbers | None,
        drawn: Drawn,
    ) -> None:
        """Keep the last token of each row; ``spans`` are its samples, None for one each."""
        last_tokens = self.stager.staging.last_tokens
        if self.drafts is not None:
            self._accept(self.drafts, launched, out.token_ids, targets, spans, drawn)
        elif spans is None:
            last_tokens.index_copy_(0, targets, out.token_ids)
        else:
            last = index_on(spans[0], targets.device)
            last_tokens.index_copy_(0, targets, out.token_ids[last])
        launched.tokens = out.token_ids.to("cpu", non_blocking=True)
        launched.logprobs = None if out.logprobs is None else out.logprobs.to_host()

    def _accept(
        self,
        drafts: RowDrafts,
        launched: LaunchedStep,
        token_ids: Tensor,
        targets: Tensor,
        spans: Numbers | None,
        drawn: Drawn,
    ) -> None:
        if launched.late:
            sampled = enumerate(launched.sampled_rows)
            late = [at for at, row in sampled if row.seq in launched.late]
            spare = index_on([self.batch.capacity] * len(late), targets.device)
            targets = targets.index_copy(0, index_on(late, targets.device), spare)
        launched.results, launched.proposed = drafts.accept(
            targets, spans, token_ids, self.stager.staging.last_tokens, drawn
        )

    def _note_tokens(self, seq: SeqId, token_ids: Sequence[int], proposed: Tensor | None) -> None:
        """Note tokens sampled for a sequence that reached the host; ignore a dropped one."""
        row = self.batch.row_of.get(seq)
        if row is None:
            return
        self.batch.sampling.extend(row, token_ids)
        if self.drafts is not None and proposed is not None:
            self.drafts.note(row, len(token_ids), proposed)

    def _await_tokens_of(self, rows: Numbers, needs: Callable[[int], bool]) -> None:
        if self._last is None or not self.batch.sampling.follows_tokens:
            return
        if any(map(needs, rows.tolist())):
            self._last.wait_tokens()

    def _move_blocks(self, plan: SchedulerOutput) -> DeviceEvent | None:
        transfers, host = plan.transfers or _NOTHING, self.host
        if host is None:
            assert plan.transfers is None, "a plan moves blocks to host memory that is not there"
            return None
        stores = transfers.stores or host.is_storing
        return host.begin(transfers, blocks_written(plan, self.batch) if stores else frozenset())

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            source, to = zip(*pairs, strict=True)
            device = self.stager.device
            copy(self.kv_cache.blocks, index_on(source, device), index_on(to, device))

    def _to_score(self, plan: Sequence[StepRow], rows: StepRows) -> Iterator[_Scored]:
        for row, last in zip(plan, rows.ends.tolist(), strict=True):
            if row.seq in self.batch.scoring:
                prompt = self.batch.sequences[row.seq].num_prompt
                count = (
                    min(row.num_computed + row.num_scheduled_tokens, prompt - 1) - row.num_computed
                )
                if count > 0:
                    yield _Scored(row, last + 1 - row.num_scheduled_tokens, count)

    def _score(
        self, scored: Sequence[_Scored], hidden: Tensor
    ) -> dict[SeqId, list[LogprobTensors]]:
        out = {}
        at = 0
        for each in scored:
            out[each.row.seq] = list(self._score_one(each, hidden[at : at + each.length]))
            at += each.length
        return out

    def _score_one(self, each: _Scored, hidden: Tensor) -> Iterator[LogprobTensors]:
        seq = self.batch.sequences[each.row.seq]
        first = each.row.num_computed + 1
        following = seq.token_ids[first : first + each.length]
        assert seq.params.prompt_logprobs is not None
        for at in range(0, each.length, PROMPT_LOGPROB_ROWS):
            part = slice(at, at + PROMPT_LOGPROB_ROWS)
            logits = self.model.logits(hidden[part])
            yield score_prompt(logits, following[part], seq.params.prompt_logprobs).to_host()


def _first_draws(sampled_rows: Sequence[StepRow]) -> Iterator[int]:
    at = 0
    for row in sampled_rows:
        yield at
        at += len(row.sample_choices)
