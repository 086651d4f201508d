"""A planner for tests of the run half: gives steps to a real executor by a script of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.sample import Sampler
from tandem.engine.step import (
    ModelRunnerOutput,
    NewSequence,
    SchedulerOutput,
    SeqId,
    StepRow,
    TokenMasks,
)
from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0)


class Listening(Sampler):
    """A sampler that keeps the logits it was given, row by row."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.heard: list[torch.Tensor] = []

    def sample(self, logits, batch, **kwargs):
        self.heard.append(logits.clone())
        return super().sample(logits, batch, **kwargs)


@dataclass
class Line:
    """One sequence as the planner sees it."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    choice: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    known: bool = False
    allowed: Sequence[int] | None = None
    """Ids out of which a grammar has it drawn."""
    embeds: PromptEmbeds | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed


class Driver:
    """Plans what it is told, on blocks taken in a scattered order."""

    def __init__(self, model: Path | str, *, num_blocks: int = 96, **settings) -> None:
        settings = {"device": "cpu", "num_gpu_blocks_override": num_blocks, **settings}
        self.config = EngineConfig.of(model, **settings)
        self.executor = UniProcExecutor()
        self.capacity = self.executor.start(self.config)
        self.runner = self.executor.worker.runner
        self.ear = self.runner.sampler = Listening(self.config.facts.vocab_size)
        self.lines: dict[SeqId, Line] = {}
        self._free = list(range(0, num_blocks, 2)) + list(range(1, num_blocks, 2))
        self._dropped: list[SeqId] = []
        self._steps = 0
        self._next = 0

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt: int | None = None,
        choice: int = 0,
        embeds: PromptEmbeds | None = None,
    ) -> SeqId:
        """A sequence that is to be computed; emitted tokens may follow the prompt."""
        seq = SeqId(self._next)
        self._next += 1
        length = len(tokens) if num_prompt is None else num_prompt
        self.lines[seq] = Line(list(tokens), length, params, choice, embeds=embeds)
        return seq

    def step(
        self,
        *chunks: tuple[SeqId, int],
        choices: dict[SeqId, tuple[int, ...]] | None = None,
        copies: Sequence[tuple[int, int]] = (),
    ) -> ModelRunnerOutput:
        """Compute so many tokens of each sequence; draw where all its tokens are computed then."""
        rows, new = [], []
        for seq, count in chunks:
            line = self.lines[seq]
            needed = -(-(line.computed + count) // self.config.cache.block_size) - len(line.blocks)
            blocks = tuple(self._free.pop() for _ in range(needed))
            line.blocks += blocks
            if not line.known:  # the first block comes with the sequence, the others with its row
                new.append(self._introduce(seq, line, line.blocks[:1]))
                blocks = blocks[1:]
            drawn = (choices or {}).get(seq, (line.choice,)) if line.pending == count else ()
            added = (blocks,) if blocks else ()
            rows.append(StepRow(seq, line.computed, count, added, drawn))
            line.computed += count
        self._steps += 1
        masks = self._masks(rows)
        plan = SchedulerOutput(
            self._steps,
            tuple(rows),
            tuple(new),
            tuple(self._dropped),
            tuple(copies),
            awaits_masks=masks is not None,
        )
        self._dropped.clear()
        future = self.executor.execute(plan)
        if masks is not None:
            self.executor.draw(masks)
        out = future.result()
        for sampled in out.sampled:
            line = self.lines[sampled.seq]
            if line.choice in sampled.choices:
                line.tokens += sampled.token_ids[sampled.choices.index(line.choice)]
        return out

    def _masks(self, rows: Sequence[StepRow]) -> TokenMasks | None:
        bounded = {
            row.seq: allowed
            for row in rows
            if row.sample_choices and (allowed := self.lines[row.seq].allowed) is not None
        }
        if not bounded:
            return None
        bits = np.zeros((len(bounded), -(-self.config.facts.vocab_size // 32) * 32), dtype=np.uint8)
        for at, allowed in enumerate(bounded.values()):
            bits[at, list(allowed)] = 1
        words = bytearray(np.packbits(bits, axis=1, bitorder="little").tobytes())
        return TokenMasks(self._steps, tuple(bounded), words)

    def _introduce(self, seq: SeqId, line: Line, held: list[int]) -> NewSequence:
        line.known = True
        eos = self.config.facts.eos_token_ids
        return NewSequence(
            seq,
            list(line.tokens),
            line.num_prompt,
            line.params,
            line.choice,
            eos,
            (held,),
            prompt_embeds=line.embeds,
            has_ids=line.embeds is None,
        )

    def drop(self, seq: SeqId) -> Line:
        """Forget the sequence with the next step, and free its blocks."""
        line = self.lines.pop(seq)
        self._free += line.blocks
        self._dropped.append(seq)
        return line

    def generate(self, seqs: Sequence[SeqId], count: int, *, budget: int = 37) -> list[list[int]]:
        """Draw ``count`` tokens of each, decodes first, then prompt chunks within the budget."""
        while unfinished := [s for s in seqs if len(self.lines[s].output) < count]:
            decodes = [s for s in unfinished if self.lines[s].pending == 1]
            left = max(budget - len(decodes), 1)
            chunks = [(s, 1) for s in decodes]
            for seq in unfinished:
                take = min(self.lines[seq].pending, left)
                if seq not in decodes and take > 0:
                    chunks.append((seq, take))
                    left -= take
            self.step(*chunks)
        return [self.lines[s].output[:count] for s in seqs]
