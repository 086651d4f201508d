"""Messages between plan and run: the plan of one step, and its results.

A rank keeps a row per sequence (``InputBatch``) with the tokens it sampled, so that a later step
may be planned before the host knows them.
"""

from dataclasses import dataclass, field
from typing import NewType

import msgspec

from tandem.protocol.kv import Fence
from tandem.protocol.outputs import TokenLogprobs
from tandem.protocol.requests import ModelInputs
from tandem.protocol.sampling import SamplingParams

SeqId = NewType("SeqId", int)
"""One choice of one request; never reused within an engine."""

NewBlocks = tuple[tuple[int, ...], ...]
"""Blocks appended to the tables of a sequence, by group."""


class NewSequence(ModelInputs, frozen=True, gc=False):
    """All data of a sequence for a rank, sent first and again after a preemption. Embeddings are
    left out once no step computes any of the prompt."""

    seq: SeqId
    token_ids: list[int]
    """Prompt, then every token already emitted."""
    num_prompt: int
    params: SamplingParams
    """Sampling parameters, with a seed."""
    choice: int
    """Number of this choice of the request: part of the key of its samples."""
    eos_token_ids: tuple[int, ...]
    """Tokens masked until ``min_tokens``."""
    block_ids: tuple[list[int], ...]
    """Block tables by group before this step, in token order; more may follow in its ``StepRow``.
    Entries before a window are negative. A state has one block."""
    has_ids: bool = True
    """False if the prompt came as embeddings: its ids are placeholders, which no rule may use."""

    @property
    def num_ruled_prompt(self) -> int:
        """Return the number of ``ruled_token_ids`` that are the prompt's."""
        return self.num_prompt if self.has_ids else 0

    @property
    def ruled_token_ids(self) -> list[int]:
        return self.token_ids if self.has_ids else self.token_ids[self.num_prompt :]


class BlockLoad(msgspec.Struct, frozen=True, gc=False):
    """Blocks loaded from host memory for one sequence, which is in no step until then."""

    ticket: int
    """Key of the rank's report of this load; never reused."""
    blocks: tuple[tuple[int, int], ...]
    """(host block, device block)."""


class BlockTransfers(msgspec.Struct, frozen=True, gc=False):
    """Transfers of a step between a rank's KV cache and its host memory: stores, then loads. The
    next step's stores wait for no load and use none of its blocks."""

    stores: tuple[tuple[int, int], ...] = ()
    """(device block, host block) to copy before a step writes the device block. Other writers wait
    for this step's fence."""
    loads: tuple[BlockLoad, ...] = ()
    """Loads to begin after all writes of earlier steps; the step does not wait for them."""


class TransferReport(msgspec.Struct, frozen=True, gc=False):
    """Results of loads since the last report; each ticket is in one report."""

    loaded: tuple[int, ...] = ()
    """Tickets whose blocks hold the host's data."""
    failed: tuple[tuple[int, str], ...] = ()
    """(ticket, reason); their blocks are no longer written."""


class StepRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step; a Struct, as a step makes hundreds."""

    seq: SeqId
    num_computed: int
    """Tokens whose KV is in the cache before the step; also the position of its first token. After
    drafts in flight the maximum: ranks know the number."""
    num_scheduled_tokens: int
    """Tokens to compute in the step, at least 1."""
    new_block_ids: NewBlocks = ()
    """Blocks appended to the sequence's tables for this step; empty if there are none."""
    sample_choices: tuple[int, ...] = ()
    """Choices to draw from the row's last logits: none within a prompt, usually one, all n for a
    fork. The first continues this sequence."""


class SpecTokens(msgspec.Struct, frozen=True, gc=False):
    """Row that also samples at the positions before its last: one for each of these tokens."""

    seq: SeqId
    num_tokens: int
    """Last tokens of the row, at least one, each of which follows a sampled position."""
    emitted: tuple[int, ...] = ()
    """These tokens, if a resumed request has emitted them: they are kept in any case. Empty: drafts
    that the ranks have proposed, which are kept if they are sampled."""


class TokenMasks(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Allowed tokens of some sequences in one step, sent after its plan and before the next one."""

    step: int
    seqs: tuple[SeqId, ...]
    words: bytearray
    """int32 [sequences, ceil(vocabulary / 32)], little-endian, lowest bit lowest id; 1 is allowed.
    """
    late: tuple[SeqId, ...] = ()
    """Sequences without a mask: they sample nothing, and their position is computed again."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Plan of one step. ``rows`` are in batch order: decodes first, then prefill chunks."""

    step: int
    rows: tuple[StepRow, ...]
    new: tuple[NewSequence, ...] = ()
    """Sequences of ``rows`` that the rank does not hold."""
    dropped: tuple[SeqId, ...] = ()
    """Finished, aborted or preempted since the last step; their rows are freed first."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) blocks to copy whole before anything of this step is written."""
    transfers: BlockTransfers | None = None
    """Transfers of an offload tier, if any. A step with transfers only waits for all that are in
    progress."""
    awaits_masks: bool = False
    """Whether rows under a grammar sample, after the step's ``TokenMasks``."""
    drafts: tuple[SpecTokens, ...] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.rows)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """Tokens drawn for one row."""

    seq: SeqId
    choices: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    """Per choice of ``choices``: one token; of a row with drafts one or several."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] | None = None
    """Parallel to ``token_ids``, if requested."""


class DraftSampled(msgspec.Struct, frozen=True, gc=False):
    """Samples of a row with ``SpecTokens``: accepted drafts and one token more, or of emitted
    tokens the one after them."""

    sampled: Sampled
    num_tokens: int
    """As in its ``SpecTokens``."""
    num_drafts: int = 0
    """Drafts that the ranks had for the row, at most ``num_tokens``."""
    replayed: tuple[int, ...] = ()
    """Tokens sampled at the positions of emitted ones, parallel to these."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Result of a step. Rank 0's is used."""

    step: int
    sampled: tuple[Sampled, ...]
    """One token a choice."""
    fence: Fence
    """Done when all KV of the step is written on every rank, and all stores to host memory so far
    have ended."""
    prompt_logprobs: dict[SeqId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Log-probabilities of prompt tokens ``num_computed + 1 ..`` of rows that request them, for
    this step's chunk."""
    transfers: TransferReport | None = None
    """None if no load has ended since the last result."""
    pooled: dict[SeqId, bytes] = field(default_factory=dict)
    """Vectors of pooled prompts that ended in the step: see ``PooledOutput.values``."""
    drafted: tuple[DraftSampled, ...] = ()
    """Samples of rows with ``SpecTokens``, which are not in ``sampled``."""
    num_proposed: dict[SeqId, int] = field(default_factory=dict)
    """Drafts for the next step of each row that sampled, if drafts are proposed."""


class FenceDone:
    """Fence of a device without a queue."""

    def done(self) -> bool:
        return True
