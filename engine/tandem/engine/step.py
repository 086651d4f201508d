"""What plan and run tell each other: what one step computes, and what came out of it.

Incremental: a rank keeps a row per sequence (``InputBatch``) and appends the tokens that it
sampled itself, so that a later step may be planned before the host knows them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

import msgspec

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.kv import Fence
from tandem.protocol.outputs import TokenLogprobs
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.sampling import SamplingParams

SeqId = NewType("SeqId", int)
"""One choice of one request within this engine; never reused while the engine lives."""


class NewSequence(msgspec.Struct, frozen=True, gc=False):
    """All that a rank must know of a sequence: at first sight, and again after a preemption."""

    seq: SeqId
    token_ids: list[int]
    """Prompt, then every token already emitted."""
    num_prompt: int
    params: SamplingParams
    """With a seed."""
    choice: int
    """Which of the request's choices this is: part of the key of its draws."""
    eos_token_ids: tuple[int, ...]
    """Masked until ``min_tokens``."""
    block_ids: list[int]
    """Blocks held before this step, in token order; more may follow in its ``StepRow``."""
    pooling: PoolingParams | None = None
    """Set for a sequence whose prompt is pooled: it draws nothing."""
    embeds: PromptEmbeds | None = None
    """Of a prompt that came as embeddings, in place of its ids; None, too, where nothing of it is
    computed for this row any more."""
    has_ids: bool = True
    """False where the prompt came as embeddings, whether or not those travel: its ids are
    placeholders, of which no rule may know."""

    @property
    def num_ruled_prompt(self) -> int:
        """Of ``ruled_token_ids``, how many are the prompt's."""
        return self.num_prompt if self.has_ids else 0

    @property
    def ruled_token_ids(self) -> list[int]:
        """The tokens that rules of draws and logits processors look at."""
        return self.token_ids if self.has_ids else self.token_ids[self.num_prompt :]


class BlockLoad(msgspec.Struct, frozen=True, gc=False):
    """Blocks that come back from host memory for one sequence, which is in no step until they are
    there."""

    ticket: int
    """Under which the rank says how it went; never used again."""
    blocks: tuple[tuple[int, int], ...]
    """(host block, device block)."""


class BlockTransfers(msgspec.Struct, frozen=True, gc=False):
    """What a step moves between a rank's slab and its host memory. In the order of steps: stores of
    one step, then its loads. Stores of the next wait for no load, whose blocks they leave alone."""

    stores: tuple[tuple[int, int], ...] = ()
    """(device block, host block) to copy before this step, or a later one, writes the device block;
    whoever writes it past the steps waits for this step's fence."""
    loads: tuple[BlockLoad, ...] = ()
    """To begin behind all that earlier steps write; the step itself need not wait for them."""


class TransferReport(msgspec.Struct, frozen=True, gc=False):
    """What has become of loads since the last report; each ticket is in one report."""

    loaded: tuple[int, ...] = ()
    """Tickets whose blocks hold what the host had."""
    failed: tuple[tuple[int, str], ...] = ()
    """(ticket, why); nothing writes their blocks any more."""


class StepRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step. A Struct: a step makes hundreds, at a ninth of the time."""

    seq: SeqId
    num_computed: int
    """Tokens whose KV is in the cache before the step; also the position of its first token."""
    num_tokens: int
    """Tokens to compute in the step, at least 1."""
    new_block_ids: tuple[int, ...] = ()
    """Blocks appended to the sequence's table for this step."""
    sample_choices: tuple[int, ...] = ()
    """Choices to draw from the row's last logits: () while the prompt goes on, (choice,)
    usually, all n at the end of a prompt that forks. The first goes on as this very sequence."""


class RowDraft(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a row behind its first wanted position, known before the row is computed: the row
    draws behind that position and behind each of them, and so has one token more at least."""

    seq: SeqId
    draft_token_ids: tuple[int, ...]
    """The tokens of the row's last positions, at least one."""
    forced: bool = False
    """The drafts were emitted and stand, whatever is drawn; the rank knows them. Else somebody
    proposes them, and the row's tokens are the last known one and these."""

    def kept(self, drawn: Sequence[int]) -> tuple[int, ...]:
        """Of the tokens drawn, one more than drafts, those that the output goes on by: the drafts
        that were drawn as well, up to the first that was not, and the token drawn behind them. A
        draw depends on the tokens before it alone, so these are the tokens of steps one by one.
        """
        if self.forced:
            return (drawn[-1],)
        accepted = 0
        for draft, token in zip(self.draft_token_ids, drawn, strict=False):
            if draft != token:
                break
            accepted += 1
        return tuple(drawn[: accepted + 1])


class TokenMasks(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Which tokens the draws of some sequences may give, in one step: sent behind its plan, before
    the next one, since masks are made while the step's forward runs."""

    step: int
    seqs: tuple[SeqId, ...]
    words: bytearray
    """int32 [sequences, ceil(vocabulary / 32)], little-endian: 32 tokens each, the lowest bit the
    lowest id; 1 is allowed."""
    late: tuple[SeqId, ...] = ()
    """Sequences whose masks are not there: they draw nothing in this step, and their position is
    computed again."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. ``rows`` are in batch order: decodes first, then prefill chunks."""

    step: int
    rows: tuple[StepRow, ...]
    new: tuple[NewSequence, ...] = ()
    """Sequences of ``rows`` that the rank does not hold (any more)."""
    dropped: tuple[SeqId, ...] = ()
    """Finished, aborted or preempted since the last step: forget their rows first."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) blocks to copy whole before anything of this step is written."""
    transfers: BlockTransfers | None = None
    """What an offload tier moves; None where there is none, or nothing to say. A step without rows
    that has them is there for them alone: its result waits for all loads and stores under way."""
    awaits_masks: bool = False
    """Whether rows under a grammar draw: the step computes, and draws when its ``TokenMasks`` have
    come."""
    drafts: tuple[RowDraft, ...] = ()
    """Of the rows that have some. They stand here, and not in the rows, because most steps have
    none, and nobody looks for them there."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step over all rows."""
        return sum(row.num_tokens for row in self.rows)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """Tokens drawn for one row."""

    seq: SeqId
    choices: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    """Per choice of ``choices``: one token; of a row with drafts one or several."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] | None = None
    """Parallel to ``token_ids`` when the request asked for them."""


class DraftSampled(msgspec.Struct, frozen=True, gc=False):
    """What a row with drafts drew: the tokens that its ``RowDraft`` keeps."""

    sampled: Sampled
    replayed: tuple[int, ...] = ()
    """What was drawn where tokens stood, parallel to the forced drafts."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step gave. Rank 0's is the one that counts."""

    step: int
    sampled: tuple[Sampled, ...]
    """One token a choice."""
    fence: Fence
    """Done when all KV of the step is written on every rank, and what went to host memory with it
    and the steps before is there."""
    prompt_logprobs: dict[SeqId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For rows that ask: log-probabilities of tokens ``num_computed + 1 ..`` of the prompt that
    this step's logits predict; the scheduler joins the chunks."""
    transfers: TransferReport | None = None
    """None where no load has ended since the last result."""
    pooled: dict[SeqId, bytes] = field(default_factory=dict)
    """Vectors of prompts that ended in the step and are pooled: see ``PooledOutput.values``."""
    drafted: tuple[DraftSampled, ...] = ()
    """Of rows with drafts, which are not in ``sampled``."""


class FenceDone:
    """A fence of a device without a queue of its own."""

    def done(self) -> bool:
        """The writes were finished before the step returned."""
        return True
