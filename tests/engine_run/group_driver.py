"""A driver of models whose layers have several groups of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count as counting
from pathlib import Path

import torch
from tests.engine_run.run_driver import GREEDY, Listening
from tests.engine_run.test_padding import Uncaptured

from tandem.engine.config import EngineConfig
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.step import NewSequence, SchedulerOutput, SeqId, StepRow
from tandem.engine.worker.inputs import StepStager
from tandem.engine.worker.kv_cache import KVCacheMemory
from tandem.engine.worker.staging import StepShape
from tandem.protocol.card import KVKind, blocks_for


@dataclass
class GroupLine:
    """One sequence: its tokens, and its blocks by group."""

    tokens: list[int]
    num_prompt: int
    tables: list[list[int]]
    computed: int = 0
    known: bool = False
    freed: list[int] = field(default_factory=list)
    """Leading blocks of each group that have left the window."""
    heard: list[torch.Tensor] = field(default_factory=list)
    """Logits of its samples, float32 [vocabulary] each."""

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class GroupDriver:
    """Plans steps by hand. Blocks are reused once they have left a window, and hold NaN until they
    are written."""

    def __init__(self, model: Path, *, num_blocks: int = 96, **settings) -> None:
        settings = {"device": "cpu", "num_gpu_blocks_override": num_blocks, **settings}
        self.config = EngineConfig.of(model, **settings)
        self.executor = UniProcExecutor()
        self.executor.start(self.config)
        self.runner = self.executor.worker.runner
        self.ear = self.runner.sampler = Listening(self.config.facts.vocab_size)
        self.groups = self.config.layout.groups
        self._memory = self.runner.kv_cache.blocks
        self._memory.fill_(0xFF)
        self._free = list(range(0, num_blocks, 2)) + list(range(1, num_blocks, 2))
        self._lines: dict[SeqId, GroupLine] = {}
        self._dropped: list[SeqId] = []
        self._steps, self._numbers = counting(1), counting()

    def pad(self, *shapes: StepShape) -> list[StepShape]:
        """Pad later steps to the ``shapes``, as for graphs; return the list of shapes run."""
        runner, device, blocks = self.runner, torch.device("cpu"), len(self._memory)
        runner.kv_cache = KVCacheMemory(self.config.layer_groups, blocks, device, spare=1)
        runner.kv_cache.memory.fill_(0xFF)
        self._memory = runner.kv_cache.blocks
        runner.stager = StepStager(
            runner.batch, device, max_tokens=600, max_len=512, spare_block=blocks
        )
        runner.graphs = graphs = Uncaptured(runner)
        graphs.offer(list(shapes))
        return graphs.replayed

    def add(self, tokens: Sequence[int]) -> SeqId:
        seq = SeqId(next(self._numbers))
        tables: list[list[int]] = [[] for _ in self.groups]
        self._lines[seq] = GroupLine(list(tokens), len(tokens), tables, freed=[0] * len(tables))
        return seq

    def step(self, *chunks: tuple[SeqId, int]) -> None:
        """Compute so many tokens of each sequence; sample if all its tokens are computed then."""
        rows, new = [], []
        for seq, count in chunks:
            line = self._lines[seq]
            added = self._grow(line, line.computed + count)
            if not line.known:
                line.known = True
                new.append(self._introduce(seq, line))
                added = ()
            drawn = (0,) if line.pending == count else ()
            rows.append(StepRow(seq, line.computed, count, added, drawn))
            line.computed += count
        plan = SchedulerOutput(next(self._steps), tuple(rows), tuple(new), tuple(self._dropped))
        self._dropped.clear()
        self.ear.heard.clear()
        out = self.executor.execute(plan).result()
        heard = torch.cat(self.ear.heard) if self.ear.heard else ()
        for sampled, logits in zip(out.sampled, heard, strict=True):
            self._lines[sampled.seq].tokens += sampled.token_ids[0]
            self._lines[sampled.seq].heard.append(logits)
        for line in self._lines.values():
            self._leave_windows(line)

    def drop(self, seq: SeqId) -> GroupLine:
        """Forget the sequence with the next step, and free its blocks."""
        line = self._lines.pop(seq)
        for table, freed in zip(line.tables, line.freed, strict=True):
            self._release(table[freed:])
        self._dropped.append(seq)
        return line

    def preempt(self, seq: SeqId) -> SeqId:
        """Drop the sequence; return one that computes all its tokens again."""
        line = self.drop(seq)
        again = self.add(line.tokens)
        self._lines[again].num_prompt = line.num_prompt
        self._lines[again].heard = line.heard
        return again

    def generate(self, seqs: Sequence[SeqId], count: int, *, budget: int) -> list[list[int]]:
        """Sample ``count`` tokens of each: decodes first, then chunks within the budget."""
        while unfinished := [s for s in seqs if len(self._lines[s].output) < count]:
            decodes = [s for s in unfinished if self._lines[s].pending == 1]
            chunks, left = [(s, 1) for s in decodes], max(budget - len(decodes), 1)
            for seq in unfinished:
                take = min(self._lines[seq].pending, left)
                if seq not in decodes and take > 0:
                    chunks.append((seq, take))
                    left -= take
            self.step(*chunks)
        return [self._lines[s].output[:count] for s in seqs]

    def logits(self, seq: SeqId) -> torch.Tensor:
        return torch.stack(self._lines[seq].heard)

    def _grow(self, line: GroupLine, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        spans, added = blocks_for(num_tokens, self.config.cache.block_size), []
        for group, table in zip(self.groups, line.tables, strict=True):
            wanted = 1 if group.kind is KVKind.STATE else spans
            blocks = tuple(self._free.pop() for _ in range(wanted - len(table)))
            table += blocks
            if group.kind is not KVKind.STATE:
                added.append(blocks)
        return tuple(added)

    def _leave_windows(self, line: GroupLine) -> None:
        for at, group in enumerate(self.groups):
            if group.kind is KVKind.WINDOW and group.span is not None:
                first = max(0, line.computed - group.span + 1) // self.config.cache.block_size
                self._release(line.tables[at][line.freed[at] : first])
                line.freed[at] = max(line.freed[at], first)

    def _release(self, blocks: list[int]) -> None:
        self._memory[blocks] = 0xFF
        self._free += blocks

    def _introduce(self, seq: SeqId, line: GroupLine) -> NewSequence:
        eos, held = self.config.facts.eos_token_ids, tuple(list(each) for each in line.tables)
        return NewSequence(seq, list(line.tokens), line.num_prompt, GREEDY, 0, eos, held)
