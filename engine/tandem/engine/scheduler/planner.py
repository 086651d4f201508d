"""Plans one step: decodes, then prompt chunks of running requests, then new ones.

A sequence gets the blocks of all its known tokens at its start, so only decodes need more. If none
is left, the running sequence that goes last is preempted. A planned row is never removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import add

from tandem.engine.config.scheduler import MOST_REPLAYED, SchedulerConfig
from tandem.engine.config.speculative import MOST_DRAFTS
from tandem.engine.request import Request
from tandem.engine.scheduler.connector import InStepConnector
from tandem.engine.scheduler.constrained import draws_several
from tandem.engine.scheduler.drafter import Drafter
from tandem.engine.scheduler.remote import RemoteKV, Way
from tandem.engine.scheduler.request_table import RequestTable
from tandem.engine.scheduler.stats import note_preemption
from tandem.engine.scheduler.updater import Chunk
from tandem.engine.step import (
    BlockTransfers,
    NewBlocks,
    NewSequence,
    SchedulerOutput,
    SpecTokens,
    StepRow,
)
from tandem.engine.timing import Chunks, MeasuredSteps, Padding, StepRoom
from tandem.protocol.messages import DecodeBatch


class Shares:
    """Shares of several tenants in one step."""

    def __init__(self, request_table: RequestTable, max_num_seqs: int) -> None:
        self._request_table = request_table
        self._num_seats = max_num_seqs
        tenants = len(request_table.tenants)
        self._seats = max_num_seqs // tenants
        self._blocks = request_table.manager.pool.num_blocks // tenants
        self._held_seats: Counter[str] = Counter()
        self._held_blocks: Counter[str] = Counter()
        for request in (*request_table.running, *request_table.loading.values()):
            self._held_seats[request.tenant] += 1
            self._held_blocks[request.tenant] += request.num_blocks

    def below(self) -> frozenset[str]:
        return frozenset(
            each
            for each in self._request_table.tenants
            if self._held_seats[each] < self._seats and self._held_blocks[each] < self._blocks
        )

    def last_of_largest(self, needs: Request) -> Request | None:
        """Return the last sequence of the tenant that holds most, if more than its part, to make
        room for ``needs``.

        Each is preempted for another tenant at most once, so all requests end.
        """
        need = self._request_table.manager.groups.num_blocks(len(needs.token_ids))
        if self._held_blocks[needs.tenant] + need > self._blocks:
            return None
        over = {
            each: max(seats / max(1, self._seats), self._held_blocks[each] / max(1, self._blocks))
            for each, seats in self._held_seats.items()
            if each != needs.tenant
        }
        largest = max(over, key=over.__getitem__, default="")
        if over.get(largest, 0.0) <= 1.0:
            return None
        for each in reversed(self._request_table.running):
            spared = each.preempted_for_tenant or not each.preemptible
            if each.tenant == largest and not spared:
                return each
        return None

    def left(self, request: Request) -> None:
        """Count a sequence that is about to lose its seat and its blocks."""
        self._held_seats[request.tenant] -= 1
        self._held_blocks[request.tenant] -= request.num_blocks

    def prompt_parts(self, running: Iterable[Request], budget: int) -> dict[str, int]:
        """Return the prompt tokens of each tenant in a step of ``budget``: equal parts, and the
        unused rest of the others."""
        wanted: Counter[str] = Counter()
        manager = self._request_table.manager
        for request in running:
            wanted[request.tenant] += request.num_uncomputed
        may_start = self._held_seats.total() < self._num_seats
        for tenant, tokens, first in self._request_table.waiting.wanted():
            if may_start:
                hits = manager.find_cached_prefix(first, first.max_cached_tokens)
                wanted[tenant] += max(1, tokens - hits.num_tokens)
        parts: dict[str, int] = {}
        for number, (tenant, tokens) in enumerate(sorted(wanted.items(), key=lambda each: each[1])):
            parts[tenant] = min(tokens, budget // (len(wanted) - number))
            budget -= parts[tenant]
        return parts


RECENT_SECONDS = 10.0
"""Time for which a request of another tenant keeps steps short while many prompt tokens wait."""


class StepBuilder:
    """Step that is being planned."""

    __slots__ = (
        "budget",
        "chunks",
        "context",
        "decodes",
        "drafts",
        "due",
        "is_short",
        "new",
        "num_tokens",
        "parts",
        "prompts",
        "replays_left",
        "room",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that still fit."""
        self.room: StepRoom | None = None
        """Room of a step that is bounded in time."""
        self.context = 0
        """Tokens before those of the decodes, in total."""
        self.num_tokens = 0
        self.decodes: list[StepRow] = []
        self.prompts: list[StepRow] = []
        self.new: list[NewSequence] = []
        self.chunks: list[Chunk] = []
        self.due: list[Request] = []
        """Sequences with one more full block to cache once the plan is final."""
        self.drafts: list[SpecTokens] = []
        self.replays_left = MOST_REPLAYED
        self.is_short = False
        """Whether a prompt's chunk found too few blocks for its window."""
        self.parts: dict[str, int] | None = None
        """Prompt tokens left for each tenant, if several have some to compute."""


class Planner:
    """Plans steps from the request table; ``num_computed`` advances with each row."""

    def __init__(
        self,
        config: SchedulerConfig,
        request_table: RequestTable,
        remote: RemoteKV | None = None,
        in_step: InStepConnector | None = None,
        measured: MeasuredSteps | None = None,
        padding: Padding | None = None,
        *,
        drafter: Drafter | None = None,
        computes_whole: bool = False,
    ) -> None:
        """``measured`` and ``padding`` are used for ``max_itl_ms``; ``computes_whole``: no prompt
        is cut."""
        self._request_table = request_table
        self._in_step = in_step
        self._manager = request_table.manager
        self._remote = remote
        self._budget = config.max_num_batched_tokens
        self._mixed = config.mixed_tokens
        self._measured = measured or MeasuredSteps()
        self._padding = padding or Padding()
        self._max_itl = None if config.max_itl_ms is None else config.max_itl_ms / 1000
        self._chunks = Chunks(config)
        self._max_num_seqs = config.max_num_seqs
        self._replay = config.replay_check_tokens
        self._drafter = drafter
        self._computes_whole = computes_whole
        self._now = 0.0

    def start_step(self, now: float) -> StepBuilder:
        self._now = now
        builder = StepBuilder(self._budget)
        shares = self._share()
        prompts, preempted = self._schedule_decodes(builder)
        if self._drafter is not None:
            self._add_drafts(builder, self._drafter)
        if not self._computes_whole:
            if self._is_shared(prompts):
                builder.budget = self._short_budget(builder)
            if shares is not None:
                self._divide(builder, shares, prompts)
        for request in prompts:
            self._schedule_prompt(builder, request)
        if not preempted:
            self._schedule_waiting(builder, now)
        if builder.is_short and not (builder.decodes or builder.prompts):
            self._preempt_last()
        return builder

    def _divide(self, builder: StepBuilder, shares: Shares, prompts: Sequence[Request]) -> None:
        """Divide the step's prompt tokens between tenants. The step is short if one tenant's fit
        into a short one."""
        builder.parts = shares.prompt_parts(prompts, builder.budget)
        if len(builder.parts) < 2:
            return
        budget = self._short_budget(builder)
        parts = shares.prompt_parts(prompts, budget)
        if any(parts[each] == wanted for each, wanted in builder.parts.items()):
            builder.budget, builder.parts = budget, parts

    def _is_shared(self, prompts: Sequence[Request]) -> bool:
        changed = self._request_table.tenants_changed
        if changed is None or self._now - changed > RECENT_SECONDS:
            return False
        tokens = self._request_table.waiting.num_tokens
        return tokens + sum(each.num_uncomputed for each in prompts) > self._budget

    def _short_budget(self, builder: StepBuilder) -> int:
        rows = builder.num_tokens
        return min(builder.budget, max(1, self._mixed(rows + 1) - rows))

    def _share(self) -> Shares | None:
        request_table, waiting = self._request_table, self._request_table.waiting
        waiting.first_tenants = waiting.passed_over = frozenset()
        if len(request_table.tenants) < 2:
            return None
        shares = Shares(request_table, self._max_num_seqs)
        waiting.first_tenants = shares.below()
        request = waiting.peek()
        if request is None or request.tenant not in waiting.first_tenants:
            return shares
        while not self._has_room(request):
            last = shares.last_of_largest(request)
            if last is None:
                break
            shares.left(last)
            note_preemption(last, self._now)
            request_table.running.remove(last)
            request_table.preempt(last)
            last.preempted_for_tenant = True
        return shares

    def _has_room(self, request: Request) -> bool:
        request_table, manager = self._request_table, self._manager
        if len(request_table.running) + len(request_table.loading) >= self._max_num_seqs:
            return False
        hits = manager.find_cached_prefix(request, request.max_cached_tokens)
        return manager.can_start(hits, len(request.token_ids), keep_spare=request_table.busy)

    def finish_step(self, builder: StepBuilder, step: int) -> SchedulerOutput | None:
        idle = not builder.decodes and not builder.prompts
        transfers = None
        if self._in_step is not None:
            transfers = self._in_step.transfers(idle=idle)
            if idle and transfers is None and self._remote is not None:
                # No later step would check soon whether the stores with the last step have ended.
                transfers = BlockTransfers() if self._remote.awaits_fence else None
        if idle and transfers is None:
            return None
        for request in builder.due:
            self._manager.cache_full(request)
        dropped, self._request_table.dropped = self._request_table.dropped, []
        self._request_table.stats.planned_tokens += builder.num_tokens
        rows = (*builder.decodes, *builder.prompts)
        return SchedulerOutput(
            step=step,
            rows=rows,
            new=tuple(builder.new),
            dropped=tuple(dropped),
            block_copies=self._manager.take_copies(),
            transfers=transfers,
            awaits_masks=self._request_table.constrained.begin(rows),
            drafts=tuple(builder.drafts),
        )

    def _schedule_decodes(self, builder: StepBuilder) -> tuple[list[Request], bool]:
        """Plan one token for each decoding sequence. Return those with more tokens, and whether a
        sequence was preempted. One token is left for a waiting prompt."""
        running = self._request_table.running
        prompts: list[Request] = []
        preempted = False
        budget = builder.budget
        owed, decoding = 0, False
        index = -1
        while (index := index + 1) < len(running):
            request = running[index]
            computed = request.num_computed
            known = len(request.token_ids) + request.num_output_placeholders
            if known - computed != 1:
                prompts.append(request)
                owed = 1
                continue
            if budget <= owed or known >= request.plan_limit:
                continue
            added: NewBlocks = ()
            if known > request.capacity:
                room = self._manager.grow(request, known)
                if room is None:
                    preempted = True
                    room = self._make_room(running, index)
                if room is None:
                    index -= 1
                    continue
                added = room
            if not request.on_rank:
                added = self._introduce(builder, request)
            builder.decodes.append(StepRow(request.seq, computed, 1, added, request.choices))
            builder.context += computed
            if computed < request.num_prefill:
                builder.chunks.append((request, computed, known, request.num_preemptions))
            else:
                decoding = True
            request.num_computed = known
            request.num_output_placeholders += 1
            if known >= request.cache_due:
                builder.due.append(request)
            budget -= 1
        rows = builder.num_tokens = len(builder.decodes)
        builder.budget = budget
        if decoding:
            if self._max_itl is None:
                builder.budget = min(budget, self._mixed(rows) - rows)
            else:
                builder.room = self._room(DecodeBatch(rows, builder.context), self._max_itl)
        return prompts, preempted

    def mixed_prompt_tokens(self, decode_batch: DecodeBatch) -> int:
        """Return the most tokens of one prompt in a step with these decodes; all, if there are
        none."""
        if not decode_batch.streams:
            return self._budget
        if self._max_itl is not None:
            return self._room(decode_batch, self._max_itl).most(
                0, self._budget - decode_batch.streams
            )
        return self._mixed(decode_batch.streams) - decode_batch.streams

    def _room(self, decode_batch: DecodeBatch, seconds: float) -> StepRoom:
        steps = self._measured
        fitting = steps.prompt_tokens_within(decode_batch, seconds, 2 * self._budget)
        return StepRoom(self._padding, decode_batch.streams, fitting, steps.steepness)

    def _add_drafts(self, builder: StepBuilder, drafter: Drafter) -> None:
        """Have decodes verify drafts, too, in the step's free tokens and blocks. Until the result,
        all counts of tokens are those if every draft is accepted."""
        most, by_seq = drafter.begin_step(len(builder.decodes)), self._request_table.by_seq
        if not most:
            return
        left, decodes = min(MOST_DRAFTS, builder.budget - 1), builder.decodes
        builder.decodes = []
        for row in decodes:
            request = by_seq[row.seq]
            count = min(most, left, request.plan_limit - request.num_tokens)
            added = None
            if count > 0 and drafter.is_due(request):
                added = self._grow_for_drafts(request, count)
            if added is None:
                builder.decodes.append(row)
                continue
            blocks = row.new_block_ids
            if added:
                blocks = tuple(map(add, blocks, added)) if blocks else added
            drafted = StepRow(row.seq, row.num_computed, 1 + count, blocks, row.sample_choices)
            builder.prompts.append(drafted)
            builder.drafts.append(SpecTokens(row.seq, count))
            builder.num_tokens += count
            builder.budget -= count
            left -= count

    def _grow_for_drafts(self, request: Request, count: int) -> NewBlocks | None:
        """Count ``count`` drafts of a planned row as pending. Return new blocks for them, or None
        if there are too few."""
        request.num_pending_drafts += count
        end = request.num_computed + count
        added: NewBlocks = ()
        if end > request.capacity:
            room = self._manager.grow(request, end)
            if room is None:
                request.num_pending_drafts -= count
                return None
            added = room
        request.num_computed = end
        request.num_output_placeholders += count
        return added

    def _make_room(self, running: list[Request], index: int) -> NewBlocks | None:
        """Return blocks for ``running[index]``, taken from those after it; None if it was
        preempted."""
        request = running[index]
        while True:
            victim = choose_victim(running, index)
            note_preemption(running[victim], self._now)
            self._request_table.preempt(running.pop(victim))
            if victim == index:
                return None
            room = self._manager.grow(request, request.num_tokens)
            if room is not None:
                return room

    def _preempt_last(self) -> None:
        """Preempt the last sequence, so that an earlier one's window finds blocks."""
        running = self._request_table.running
        victim = choose_victim(running, 0)
        if victim:
            note_preemption(running[victim], self._now)
            self._request_table.preempt(running.pop(victim))

    def _schedule_prompt(
        self, builder: StepBuilder, request: Request, most: int | None = None
    ) -> None:
        count = self._chunk_tokens(builder, request, most)
        if count == 0 or request.plan_limit <= request.num_tokens:
            return
        start = request.num_computed
        end, last = start + count, count == request.num_uncomputed
        added: NewBlocks = ()
        if end > request.capacity:
            room = self._manager.grow(request, request.num_tokens)
            if room is None:
                builder.is_short = True
                return
            added = room
        if not request.on_rank:
            added = self._introduce(builder, request)
        choices = request.choices if last else ()
        builder.prompts.append(StepRow(request.seq, start, count, added, choices))
        builder.chunks.append((request, start, end, request.num_preemptions))
        if last and self._replay and request.num_output:
            self._replay_last(builder, request, count - 1)
        request.num_computed = end
        if self._manager.groups.states and end % self._manager.block_size == 0:
            self._manager.snapshot(request, end)
        request.num_output_placeholders += last
        if end >= request.cache_due:
            builder.due.append(request)
        builder.budget -= count
        if builder.parts is not None:
            builder.parts[request.tenant] -= count
        if builder.room is not None:
            builder.room.take(start, count)
        builder.num_tokens += count

    def _chunk_tokens(self, builder: StepBuilder, request: Request, most: int | None) -> int:
        remaining = request.num_uncomputed
        alone = not builder.prompts and self._request_table.waiting.peek() is None
        most = builder.budget if most is None or alone else min(builder.budget, most)
        if builder.parts is not None:
            most = min(most, builder.parts.get(request.tenant, 0))
        if builder.room is not None:
            most = builder.room.most(request.num_computed, min(most, remaining))
        count = self._chunks.count(remaining, most, alone=alone)
        if not self._manager.groups.states:
            return count
        return self._cut_at_border(request, request.num_computed, count)

    def _cut_at_border(self, request: Request, start: int, count: int) -> int:
        """Return the tokens of a chunk that ends at a border of blocks, if it can: states are kept
        there. An equal prompt begins at the last border before its end."""
        size, end = self._manager.block_size, start + count
        border = (request.num_prefill - 1) // size * size
        if end > border:
            return border - start if start < border else count
        aligned = end // size * size
        return aligned - start if aligned > start else count

    def _replay_last(self, builder: StepBuilder, request: Request, most: int) -> None:
        """Have the last chunk of a resumed sequence sample after its last ``most`` emitted tokens,
        too. Not with grammars, logits processors or bounded thinking."""
        count = min(self._replay, request.num_output, most, builder.replays_left)
        bounded = request.group.source.params.thinking is not None
        if count > 0 and not bounded and draws_several(request):
            tokens = tuple(request.token_ids[-count:])
            builder.drafts.append(SpecTokens(request.seq, count, tokens))
            builder.replays_left -= count

    def _schedule_waiting(self, builder: StepBuilder, now: float) -> None:
        request_table, remote = self._request_table, self._remote
        aside, before = [], builder.num_tokens
        while (
            builder.budget
            and len(request_table.running) + len(request_table.loading) < self._max_num_seqs
        ):
            if builder.parts is not None:
                request_table.waiting.passed_over = {
                    each for each, left in builder.parts.items() if not left
                }
            request = request_table.waiting.peek()
            if request is None:
                break
            if request.num_output_placeholders > 0:
                aside.append(request_table.waiting.pop())
                continue
            way = Way.COMPUTE if remote is None else remote.way_of(request)
            if way is Way.GONE:
                continue
            if self._computes_whole and len(request.token_ids) > builder.budget:
                break
            left = self._chunks.most_begun + before - builder.num_tokens
            if builder.room is not None and builder.room.is_full:
                break
            if way is Way.WAIT or left <= 0 or not self._start(request, now):
                break
            self._schedule_prompt(builder, request, left)
        for request in aside:
            request_table.waiting.push(request)
        request_table.waiting.passed_over = frozenset()

    def _start(self, request: Request, now: float) -> bool:
        request_table, manager = self._request_table, self._manager
        hits = manager.find_cached_prefix(request, request.max_cached_tokens)
        count = len(request.token_ids)
        if not manager.can_start(hits, count, keep_spare=request_table.busy):
            return False
        request_table.waiting.pop()
        manager.start(request, hits, count)
        request.num_computed = hits.num_tokens
        if request.group.scheduled is None:
            request.group.scheduled = now
            request.group.num_hit = request.num_computed  # a later choice finds what this computes
        if request.num_preemptions == 0:
            self._count_start(request)
        request_table.join(request)
        if self._remote is not None:
            self._remote.started(request)
        return True

    def _count_start(self, request: Request) -> None:
        stats, group = self._request_table.stats, request.group
        group.num_computed_prompt += request.num_prefill - request.num_computed
        stats.queried_tokens += request.num_prefill
        stats.hit_tokens += request.num_computed
        stats.prompt_tokens += request.num_prefill
        stats.computed_tokens += request.num_prefill - request.num_computed

    def _introduce(self, builder: StepBuilder, request: Request) -> NewBlocks:
        builder.new.append(request.as_new())
        request.on_rank, request.num_proposed = True, 0
        return ()


def choose_victim(running: Sequence[Request], first: int) -> int:
    """Return the index of the request to preempt so that ``running[first]`` may grow, or ``first``.

    It is the last of ``running`` (best first) whose blocks are not promised to a peer, never before
    ``first``, so the first request always progresses.
    """
    for index in range(len(running) - 1, first, -1):
        if running[index].preemptible:
            return index
    return first
