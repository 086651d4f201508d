"""An executor without a model, whose tokens depend on all that a model's would depend on.

Each KV slot holds a digest of the token written there and of the slot before it, read back
through the block table; the next token is drawn from the last digest. So a wrong block table, a
stale block, a lost copy or a token out of order changes what comes out, and any order of steps
that is right gives the same tokens as computing each request alone (``SimModel.generate``).

What tests of the scheduler, of clients and of a worker's shell run on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msgspec import structs
from tests.engine_plan.sim_host import HostMemory, KVCacheMemory, StoreFence

from tandem.engine.config import EngineConfig
from tandem.engine.kv_memory import Capacity, KVCacheAllocator, KVRegion
from tandem.engine.step import (
    BlockTransfers,
    DraftSampled,
    FenceDone,
    ModelRunnerOutput,
    NewSequence,
    Sampled,
    SchedulerOutput,
    SeqId,
    SpecTokens,
    StepRow,
    TokenMasks,
)
from tandem.protocol.card import KVGroup, KVKind
from tandem.protocol.commands import SleepTag
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.kv import BlockTables, Fence
from tandem.protocol.outputs import Finish, TokenLogprobs, finish_of
from tandem.protocol.pooling import PoolingParams, PoolingType
from tandem.protocol.sampling import SamplingParams

_MASK = (1 << 61) - 1
_PRIME = 0x1D8E4E27C47D124F
_ROOT = 0x5851F42D4C957F2D


def _mix(state: int, value: int) -> int:
    """One round of a multiplicative hash modulo 2**61 - 1."""
    return ((state ^ (value + 0x9E3779B9)) * _PRIME + value) % _MASK


@dataclass(frozen=True, slots=True)
class SimModel:
    """The pretended model: a hash chain over tokens."""

    vocab_size: int

    def write(self, before: int | None, token: int) -> int:
        """What the KV slot of ``token`` holds, after the slot ``before`` it."""
        return _mix(_ROOT if before is None else before, token)

    def draw(
        self, state: int, params: SamplingParams, choice: int, position: int, ends: Sequence[int]
    ) -> int:
        """The token after ``state`` at output ``position``; greedy ones ignore seed and choice."""
        mixed = state
        if not params.greedy:
            mixed = _mix(_mix(mixed, params.seed or 0), choice)
        token = mixed % self.vocab_size
        masked = (*(() if params.ignore_eos else ends), *params.stop_token_ids)
        if position + 1 < params.min_tokens:
            while token in masked:
                token = (token + 1) % self.vocab_size
        return token

    def pooled(self, params: PoolingParams, before: float, states: Sequence[int]) -> float:
        """The one value of a vector: of the last slot, or the sum over all so far."""
        values = [float(state % 97) for state in states]
        return values[-1] if params.pooling_type == PoolingType.LAST else before + sum(values)

    def allowed(self, masks: TokenMasks, seq: SeqId) -> list[int]:
        """Tokens that the masks of a step allow to a sequence."""
        size = 4 * -(-self.vocab_size // 32)
        at = masks.seqs.index(seq) * size
        words = int.from_bytes(masks.words[at : at + size], "little")
        return [token for token in range(self.vocab_size) if words >> token & 1]

    def logprobs(self, state: int, token: int, count: int) -> TokenLogprobs:
        """Log-probabilities that depend on the state alone."""
        best = tuple((state + index) % self.vocab_size for index in range(count))
        chances = tuple(-float(index + 1) for index in range(count))
        return TokenLogprobs(token, -float(state % 97), 1, best, chances)

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        eos: Sequence[int] = (),
        max_model_len: int,
        forced: Sequence[int] = (),
    ) -> tuple[list[int], Finish]:
        """The output of one request computed alone, ``forced`` tokens first: what must come out
        of any order of steps."""
        state: int | None = None
        for token in (*prompt, *forced):
            state = self.write(state, token)
        assert state is not None, "an empty prompt"
        output = list(forced)
        while True:
            token = self.draw(state, params, choice, len(output), eos)
            output.append(token)
            finish = finish_of(
                params,
                eos,
                token,
                num_emitted=len(output),
                num_prompt=len(prompt),
                max_model_len=max_model_len,
            )
            if finish is not None:
                return output, finish
            state = self.write(state, token)


@dataclass(slots=True)
class _Row:
    new: NewSequence
    token_ids: list[int]
    tables: list[list[int]] = field(default_factory=list)
    pooled: float = 0.0
    """What a vector has come to."""
    drafts: list[int] = field(default_factory=list)
    """Proposed after its last token."""


class _Open(NamedTuple):
    """A step that has written its tokens and drawn none."""

    drawing: list[tuple[_Row, StepRow, int]]
    """Rows that draw, with the state that they draw behind."""
    output: ModelRunnerOutput
    """Without what is drawn."""
    future: Future[ModelRunnerOutput]


def _placed(row: _Row, each: StepRow) -> StepRow:
    """A row behind as many tokens as the steps before have kept."""
    if each.num_computed < len(row.new.token_ids):
        return each
    assert len(row.token_ids) <= each.num_computed + 1, "more tokens than were planned"
    return structs.replace(each, num_computed=len(row.token_ids) - 1)


def _padded(drafts: Sequence[int], count: int) -> list[int]:
    return [*drafts[:count], *[0] * (count - len(drafts))]


class SimExecutor:
    """Runs plans at once, in order, on a slab of digests."""

    def __init__(
        self,
        num_blocks: int,
        *,
        verify: bool = False,
        make_fence: Callable[[SchedulerOutput], Fence] | None = None,
        num_cpu_blocks: int = 0,
    ) -> None:
        """``verify`` re-reads the whole context of each row, as attention would, and holds it to
        the tokens. ``make_fence`` gives the fence of each step (by default it is done).
        ``num_cpu_blocks`` are offered for blocks that are offloaded."""
        self._num_blocks = num_blocks
        self._verify = verify
        self._make_fence = make_fence
        self._rows: dict[SeqId, _Row] = {}
        self.kv_cache: KVCacheMemory = []
        self._block_size = 0
        self.model = SimModel(0)
        self.memory = HostMemory(num_cpu_blocks)
        self.slept: list[int] = []
        self.woken: list[SleepTag] = []
        self.fails_to_wake: Exception | None = None
        self.guess: tuple[int, int] | None = None
        """Drafts proposed after each draw, and of how many each is wrong; None proposes none."""
        self.num_checked = 0
        """Drafts that were in plans."""
        self._open: _Open | None = None
        """The step that awaits its masks."""

    def start(self, config: EngineConfig, allocate: KVCacheAllocator | None = None) -> Capacity:
        """An empty slab of the config's block size."""
        self._block_size = config.cache.block_size
        self.groups = config.layout.groups
        self.kv_cache = [[None] * self._block_size for _ in range(self._num_blocks)]
        self.model = SimModel(config.facts.vocab_size)
        return Capacity(self._num_blocks, config.layout, self.memory.num_blocks)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run a step; the future is done when this returns, or with ``draw``."""
        assert self._open is None, "a step is launched before the last one has its masks"
        self._prepare(plan)
        drawing, drafted = list[tuple[_Row, StepRow, int]](), []
        prompt_logprobs = {}
        pooled = {}
        num_proposed: dict[SeqId, int] = {}
        drafts = {each.seq: each for each in plan.drafts}
        for planned in plan.rows:
            row = self._rows[planned.seq]
            for table, more in zip(row.tables, planned.new_block_ids, strict=False):
                table += more
            each = _placed(row, planned)
            if each.seq in drafts and not drafts[each.seq].emitted:
                assert each.num_computed + 1 == len(row.token_ids), "drafts follow the last token"
                row.token_ids += _padded(row.drafts, drafts[each.seq].num_tokens)
            states = self._write(row, each)
            if row.new.params.prompt_logprobs is not None:
                prompt_logprobs[each.seq] = self._prompt_logprobs(row, each, states)
            pooling = row.new.pooling
            if pooling is not None:
                assert not each.sample_choices
                row.pooled = self.model.pooled(pooling, row.pooled, states)
                if each.num_computed + each.num_scheduled_tokens == row.new.num_prompt:
                    pooled[each.seq] = array("f", [row.pooled]).tobytes()
            if each.seq in drafts:
                drafted.append(self._sample_drafted(row, each, states, drafts[each.seq]))
                num_proposed[each.seq] = len(row.drafts)
            elif each.sample_choices:
                drawing.append((row, each, states[-1]))
        fence = FenceDone() if self._make_fence is None else self._make_fence(plan)
        memory = self.memory
        if not plan.rows:
            memory.store(self.kv_cache, memory.num_begun - memory.num_stored)
        if memory.num_begun > memory.num_stored:
            fence = StoreFence(memory, self.kv_cache, fence, memory.num_begun)
        future: Future[ModelRunnerOutput] = Future()
        report = self.memory.report(self.kv_cache, wait=not plan.rows)
        output = ModelRunnerOutput(
            plan.step, (), fence, prompt_logprobs, report, pooled, tuple(drafted), num_proposed
        )
        self._open = _Open(drawing, output, future)
        if not plan.awaits_masks:
            self.draw(TokenMasks(plan.step, (), bytearray()))
        return future

    def _prepare(self, plan: SchedulerOutput) -> None:
        for seq in plan.dropped:
            del self._rows[seq]
        for new in plan.new:
            assert new.seq not in self._rows, f"sequence {new.seq} is introduced twice"
            self._rows[new.seq] = _Row(new, new.token_ids.copy(), [*map(list, new.block_ids)])
        self.memory.begin(self.kv_cache, plan.transfers or BlockTransfers(), self._written(plan))
        for source, destination in plan.block_copies:
            self.kv_cache[destination] = self.kv_cache[source].copy()

    def _written(self, plan: SchedulerOutput) -> set[int]:
        size, written = self._block_size, {to for _, to in plan.block_copies}
        for each in plan.rows:
            end, tables = each.num_computed + each.num_scheduled_tokens, self._rows[each.seq].tables
            for at, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
                held = [*table, *(each.new_block_ids[at] if at < len(each.new_block_ids) else ())]
                first = 0 if group.kind is KVKind.STATE else each.num_computed // size
                written.update(held[first : -(-end // size)])
        return written

    def draw(self, masks: TokenMasks) -> None:
        """Draw for the step launched last; its future is done then."""
        assert self._open is not None, "no step awaits masks"
        (drawing, output, future), self._open = self._open, None
        assert output.step == masks.step, "masks of another step"
        sampled = [self._sample(*each, masks) for each in drawing if each[1].seq not in masks.late]
        if self.guess is not None:
            output.num_proposed.update(
                (each.seq, len(self._rows[each.seq].drafts)) for each in sampled
            )
        future.set_result(replace(output, sampled=tuple(sampled)))

    def regions(self) -> tuple[KVRegion, ...]:
        return ()

    def sleep(self, level: int) -> int:
        """Forget the slab; a step before it is there again fails."""
        self.memory.store(self.kv_cache, self.memory.num_begun - self.memory.num_stored)
        self.slept.append(level)
        given, self.kv_cache = len(self.kv_cache), []
        return given

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """An empty slab again, or what a test wants it to fail with."""
        if self.fails_to_wake is not None:
            raise self.fails_to_wake
        self.woken += tags
        if SleepTag.KV_CACHE in tags:
            self.kv_cache = [[None] * self._block_size for _ in range(self._num_blocks)]

    def profile(self, folder: str | None) -> str:
        """A pretended model's steps do nothing that could be recorded."""
        raise InvalidParameter("torch_profiler_dir", folder, "an engine that runs a model")

    def processes(self) -> Mapping[int, int]:
        return {}

    def check_health(self) -> None:
        """Always well."""

    def stop(self) -> None:
        """Nothing runs."""

    def read(self, block_ids: Sequence[int], tokens: range) -> list[int | None]:
        """What the slots of ``tokens`` hold, as a peer would fetch them."""
        size = self._block_size
        return [self.kv_cache[block_ids[at // size]][at % size] for at in tokens]

    def fill(self, block_ids: Sequence[int], tokens: range, content: Sequence[int | None]) -> None:
        """Write slots from outside, as a transport would."""
        for at, value in zip(tokens, content, strict=True):
            self.memory.check_written(block_ids[at // self._block_size])
            self.kv_cache[block_ids[at // self._block_size]][at % self._block_size] = value

    def _write(self, row: _Row, each: StepRow) -> list[int]:
        """Write the row's tokens; the digests, first to last."""
        start, end = each.num_computed, each.num_computed + each.num_scheduled_tokens
        before = self.read(row.tables[0], range(start - 1, start))[0] if start else None
        assert not start or before is not None, f"sequence {each.seq} reads an unwritten slot"
        if self._verify:
            self._check_context(row, each)
        states = []
        for token in row.token_ids[start:end]:
            before = self.model.write(before, token)
            states.append(before)
        for group, table in zip(self.groups, row.tables, strict=True):
            if group.kind is KVKind.STATE:
                self.fill(table, range(1), states[-1:])
            else:
                self.fill(table, range(start, end), states)
        return states

    def expected(self, group: KVGroup, states: Sequence[int | None]) -> list[int | None]:
        """What the ``visible`` slots hold after the tokens of ``states``."""
        if group.kind is KVKind.STATE:
            return list(states[-1:])
        slots = self.visible(group, len(states))
        return list(states[slots.start : slots.stop])

    def fill_tables(self, tables: BlockTables, tokens: range, states: Sequence[int | None]) -> None:
        """Write what a hand-off of ``tokens`` brings: a window's blocks, the last state."""
        for group, table in zip(self.groups, tables, strict=True):
            slots = self.visible(group, tokens.stop)
            if group.kind is KVKind.STATE:
                self.fill(table, slots, states[tokens.stop - 1 : tokens.stop])
            else:
                first = slots.start // self._block_size * self._block_size
                slots = range(max(first, tokens.start), slots.stop)
                self.fill(table, slots, states[slots.start : slots.stop])

    def visible(self, group: KVGroup, num_computed: int) -> range:
        """Slots of a group's table that the next token reads."""
        if group.kind is KVKind.STATE:
            return range(min(num_computed, 1))
        return range(max(0, num_computed - (group.span or num_computed + 1) + 1), num_computed)

    def _check_context(self, row: _Row, each: StepRow) -> None:
        expected: list[int | None] = []
        state: int | None = None
        for token in row.token_ids[: each.num_computed]:
            state = self.model.write(state, token)
            expected.append(state)
        for group, table in zip(self.groups, row.tables, strict=True):
            found = self.read(table, self.visible(group, each.num_computed))
            wanted = self.expected(group, expected)
            assert found == wanted, f"sequence {each.seq} reads KV of other tokens: {group.kind}"

    def _sample(self, row: _Row, each: StepRow, state: int, masks: TokenMasks) -> Sampled:
        new = row.new
        assert each.num_computed + each.num_scheduled_tokens == len(row.token_ids), (
            "sampled in mid-prompt"
        )
        position = len(row.token_ids) - new.num_prompt
        tokens = tuple(
            self.model.draw(state, new.params, choice, position, new.eos_token_ids)
            for choice in each.sample_choices
        )
        if each.seq in masks.seqs:
            allowed = self.model.allowed(masks, each.seq)
            tokens = tuple(allowed[token % len(allowed)] for token in tokens)
        row.token_ids.append(tokens[each.sample_choices.index(new.choice)])
        self._propose(row, state)
        count = new.params.logprobs
        told = None
        if count is not None:
            told = tuple((self.model.logprobs(state, token, count),) for token in tokens)
        return Sampled(each.seq, each.sample_choices, tuple((token,) for token in tokens), told)

    def _sample_drafted(
        self, row: _Row, each: StepRow, states: Sequence[int], draft: SpecTokens
    ) -> DraftSampled:
        """Draw behind the row's last tokens, and keep what stands; the row then goes on by that."""
        new, (choice,) = row.new, each.sample_choices
        assert each.num_computed + each.num_scheduled_tokens == len(row.token_ids), (
            "drafts at the end"
        )
        more = draft.num_tokens
        checked = row.token_ids[-more:]
        assert not draft.emitted or checked == list(draft.emitted)
        position = len(row.token_ids) - more - new.num_prompt
        behind = states[-1 - more :]
        drawn = [
            self.model.draw(state, new.params, choice, position + at, new.eos_token_ids)
            for at, state in enumerate(behind)
        ]
        same = 0
        while same < min(more, len(row.drafts)) and checked[same] == drawn[same]:
            same += 1
        kept = (drawn[-1],) if draft.emitted else tuple(drawn[: same + 1])
        num_drafts = 0 if draft.emitted else min(more, len(row.drafts))
        self.num_checked += num_drafts
        told = None
        if new.params.logprobs is not None:
            states_of = behind[-1:] if draft.emitted else behind[: len(kept)]
            scores = zip(states_of, kept, strict=True)
            told = (tuple(self.model.logprobs(*each, new.params.logprobs) for each in scores),)
        if not draft.emitted:
            del row.token_ids[-more:]
        row.token_ids += kept
        self._propose(row, behind[-1] if draft.emitted else behind[same])
        sampled = Sampled(each.seq, each.sample_choices, (kept,), told)
        replayed = tuple(drawn[:-1]) if draft.emitted else ()
        return DraftSampled(sampled, more, num_drafts, replayed)

    def _propose(self, row: _Row, state: int) -> None:
        """Draft tokens after the last one, which follows ``state``: right ones, some changed."""
        row.drafts = []
        most, wrong_every = self.guess or (0, 1)
        state, new = self.model.write(state, row.token_ids[-1]), row.new
        for position in range(first := len(row.token_ids) - new.num_prompt, first + most):
            token = self.model.draw(state, new.params, new.choice, position, new.eos_token_ids)
            state = self.model.write(state, token)
            wrong = position % wrong_every == 0
            row.drafts.append((token + wrong) % self.model.vocab_size)

    def _prompt_logprobs(
        self, row: _Row, each: StepRow, states: Sequence[int]
    ) -> tuple[TokenLogprobs, ...]:
        count = row.new.params.prompt_logprobs or 0
        first = each.num_computed + 1
        predicted = row.token_ids[
            first : min(first + each.num_scheduled_tokens, row.new.num_prompt)
        ]
        return tuple(
            self.model.logprobs(state, token, count)
            for state, token in zip(states, predicted, strict=False)
        )
