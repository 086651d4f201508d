"""A request as the scheduler sees it: one ``Request`` per choice, one ``RequestGroup`` per key.

A prompt with n choices starts as one Request that draws n first tokens and is then forked; a
resumed one starts as a Request for each choice that has not ended. Fields are written by their
owners only: those of blocks by ``KVCacheManager``; ``num_computed`` by ``Planner`` as it drafts, by
``RemoteKV`` as KV comes, by ``Updater`` for a fork, by ``Roster`` where a preemption takes it back,
by ``Constrained`` where a late mask does; tokens by ``Updater``; state and place by ``Roster`` and
``RemoteKV``.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Self

import msgspec

from tandem.engine.step import NewSequence, SeqId
from tandem.protocol.errors import Refusal
from tandem.protocol.hashing import extend_hashes
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.outputs import TokenLogprobs
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.timeline import NoteBook

Order = tuple[int, int, int, int]
"""(priority, tag of the tenant's turn, arrival, choice); smaller goes first. Unique in one engine.
With one tenant tags follow arrivals."""


class RequestState(Enum):
    """Where a Request is; each has one owner."""

    WAITING = "waiting"
    """In the queue, never computed."""
    GATED = "gated"
    """Waits for something that is made or fetched for it; in no queue, nothing is reserved."""
    REMOTE = "remote"
    """Parked: its KV comes from elsewhere, nothing is reserved."""
    LOADING = "loading"
    """Blocks are reserved and being written by the connector."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Back in the queue without blocks, to be computed again."""
    FINISHED = "finished"


class Gate(Protocol):
    """Called by the scheduler in its step loop; never blocks. For one sequence: ``admit``, then
    ``failed`` and ``ready`` until it is one of them, ``enter``, and ``release`` at its end,
    whatever came before. A preemption changes nothing: what was entered stays until ``release``."""

    @property
    def seconds(self) -> float:
        """How long a request may wait here."""
        ...

    @property
    def is_preparing(self) -> bool:
        """Whether the gate makes what it makes once, for all that will come: time that no request
        is charged with."""
        ...

    def asks(self, source: EngineCoreRequest) -> bool:
        """Whether a request has to pass here; if not, it is never heard of again."""
        ...

    def admit(self, request: Request) -> Refusal | None:
        """Begin what is slow, or say why not; then nothing is held."""
        ...

    def waits(self, request: Request) -> bool:
        """Whether others are before it, so that nobody is at work for it: such time is not charged
        to the work."""
        ...

    def failed(self, request: Request) -> Refusal | None:
        """Why it never opens, which ends the request."""
        ...

    def ready(self, request: Request) -> bool:
        """Whether it is open."""
        ...

    def overdue(self, request: Request) -> Refusal:
        """What to tell a request that waited for ``seconds``: for others, or for its own."""
        ...

    def enter(self, request: Request) -> None:
        """All gates are open: give the request what it came for."""
        ...

    def forked(self, parent: Request, child: Request) -> None:
        """``child`` goes on from where ``parent`` is, and holds the same from now on."""
        ...

    def release(self, request: Request) -> None:
        """The request ended, or it was never let in."""
        ...

    def close(self) -> None:
        """The engine ends. May be called twice."""
        ...


class TokenConstraint(Protocol):
    """Which tokens a request may get: what a gate may leave in ``Request.constraint``. A mask is
    made after each token, and the next is drawn when it is there. Methods raise TandemError when
    the tokens cannot be followed."""

    @property
    def mask(self) -> bytes | bytearray:
        """Of the next token, a row of ``TokenMasks.words``; once ``is_ready``."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether no token may come next; once ``is_ready``."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether the answer so far can only end."""
        ...

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether the next token's mask is made, waited for so long."""
        ...

    def call_when_ready(self) -> None:
        """Have the step loop woken once the mask is made: nobody looks for it meanwhile."""
        ...

    def accept(self, token: int, *, last: bool = False) -> bool:
        """The answer went on by ``token``, its ``last`` one or not; whether it can only end now."""
        ...

    def ends_with(self, token: int) -> bool:
        """Whether it could only end after ``token``, which is not taken."""
        ...

    def fork(self) -> Self:
        """A constraint of another choice, which stands where this one does."""
        ...

    def drop(self) -> object:
        """The request ended: whatever is left for the gate."""
        ...

    def refusal(self, words: str) -> Refusal:
        """How a request ends whose tokens cannot be followed further."""
        ...


@dataclass(slots=True, eq=False)
class RequestGroup:
    """One EngineCoreRequest while any of its choices lives."""

    source: EngineCoreRequest
    root: BlockHash
    """Parent of the first block's hash."""
    block_size: int
    arrival: float
    """Seconds on the engine's clock."""
    number: int
    """Counts arrivals."""
    turn: int
    """Start tag in the order of tenants."""
    deadline: float | None
    """Seconds on the engine's clock."""
    max_model_len: int
    """Prompt and output tokens at which a choice ends by length."""
    gates: tuple[Gate, ...] = ()
    """What its sequences wait for, or hold until the scheduler lets go of them."""
    live: dict[int, Request] = field(default_factory=dict)
    """By choice; a fork's choices appear when it happens."""
    cut: set[int] = field(default_factory=set)
    """Choices that are to end with their next token: their reader has found their end."""
    scheduled: float | None = None
    """When its first tokens were planned."""
    first_token: float | None = None
    num_generated: int = 0
    num_preemptions: int = 0
    num_hit: int = 0
    """Tokens found in the prefix cache at the first start, for the first choice."""
    num_computed_prompt: int = 0
    """Prompt tokens planned to be computed here, again after a preemption not counted."""
    notes: NoteBook | None = None
    """Where its time goes, when that is asked for."""

    @property
    def key(self) -> RequestKey:
        """Identity of the attempt."""
        return self.source.key


class Request:
    """One sequence: the prompt and the tokens of one choice."""

    __slots__ = (
        "attempt",
        "block_hashes",
        "block_ids",
        "cache_due",
        "capacity",
        "choice",
        "choices",
        "constraint",
        "enders",
        "group",
        "last_token_at",
        "max_len",
        "num_announced",
        "num_cached_blocks",
        "num_computed",
        "num_generated",
        "num_pending",
        "num_preemptions",
        "num_prefill",
        "num_prompt",
        "on_rank",
        "order",
        "own_choice",
        "params",
        "plan_limit",
        "preempted_for_tenant",
        "prompt_logprobs",
        "remote_done",
        "request_id",
        "router",
        "seq",
        "state",
        "token_ids",
    )

    def __init__(
        self,
        seq: SeqId,
        group: RequestGroup,
        choices: tuple[int, ...],
        *,
        token_ids: list[int],
        num_prompt: int,
        order: Order,
        max_len: int,
        block_hashes: list[BlockHash],
    ) -> None:
        """``choices`` are drawn at the end of the prefill, the first stays with this Request; a
        request that is pooled draws none, and waits for its vector as others for a token."""
        params = group.source.params
        eos = () if params.ignore_eos else group.source.eos_token_ids
        key = group.source.key
        self.seq = seq
        self.group = group
        self.request_id, self.attempt, self.router = key.request, key.attempt, key.router
        self.choice = choices[0]
        self.choices = choices if group.source.pooling is None else ()
        self.own_choice = (choices[0],)
        self.order = order
        self.params: SamplingParams = params
        self.num_prompt = num_prompt
        self.token_ids = token_ids
        """Prompt, forced and generated tokens, as far as the host knows them."""
        self.num_prefill = len(token_ids)
        """Tokens known when it came: prompt and forced ones."""
        self.num_generated = 0
        self.num_computed = 0
        """Tokens whose KV is written once all planned steps are done."""
        self.num_pending = 0
        """Tokens that planned steps will draw, not yet known here."""
        self.max_len = max_len
        """Prompt and output end here: by max_tokens or by the context."""
        ends_with_first = len(self.choices) != 1 or isinstance(group.source.kv, Produce)
        self.plan_limit = self.num_prefill + 1 if ends_with_first else max_len
        """No step is planned when known and pending tokens are this many."""
        self.enders: Container[int] = frozenset(eos) | frozenset(params.stop_token_ids)
        """Tokens that may end it; the verdict is ``finish_of``'s."""
        self.constraint: TokenConstraint | None = None
        """Which tokens may come; then ``enders`` is ``EVERY_TOKEN``, and ``plan_limit`` is 0 while
        the next one's mask is late."""
        self.block_ids: list[int] = []
        self.block_hashes = block_hashes
        self.capacity = 0
        """Tokens that the blocks hold."""
        self.num_cached_blocks = 0
        """Blocks that are hits or have been offered to the prefix cache."""
        self.cache_due = sys.maxsize
        """Tokens at which one more block can be cached."""
        self.num_announced = 0
        """Prompt tokens told to the connector."""
        # Choices without a seat after their prompt count as preempted, too.
        self.num_preemptions, self.preempted_for_tenant = 0, False
        self.state = RequestState.WAITING
        self.on_rank = False
        """Whether the ranks hold a row of it."""
        self.remote_done = False
        """Whether the connector has said all it has to say about where the KV comes from."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if self._scores_prompt() else None
        )
        """What is joined so far; None when not asked for, or already told."""
        self.last_token_at = 0.0

    def _scores_prompt(self) -> bool:
        """Whether its prompt's log-probabilities are wanted, and nobody has told them."""
        untold = self.num_prefill == self.num_prompt and not isinstance(self.kv, Consume)
        return self.params.prompt_logprobs is not None and untold

    def __repr__(self) -> str:
        return f"Request({self.seq}, {self.key}, choice={self.choice}, {self.state.value})"

    @property
    def key(self) -> RequestKey:
        """Identity of the attempt it belongs to."""
        return self.group.source.key

    @property
    def source(self) -> EngineCoreRequest:
        """The message that brought it."""
        return self.group.source

    @property
    def tenant(self) -> str:
        """Tenant that it is computed for."""
        return self.group.source.tenant

    @property
    def kv(self) -> Produce | Consume | None:
        """Which half of a hand-off it is, if any."""
        return self.group.source.kv

    @property
    def leads(self) -> bool:
        """Whether it is the first of its request's sequences that live."""
        return next(iter(self.group.live.values()), self) is self

    @property
    def preemptible(self) -> bool:
        """A producer's blocks are promised to a peer: never taken away."""
        return not isinstance(self.group.source.kv, Produce)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist: known ones and those that steps in flight will draw."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Known tokens after the prompt, forced ones included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens that no step has computed or will."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def finished(self) -> bool:
        """Whether the scheduler has let go of it."""
        return self.state is RequestState.FINISHED

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that may come from the prefix cache: at least one is computed for its logits,
        and prompt logprobs need the logits of each position that is still missing. What is pooled
        of more than the last token needs hidden states, which no cache has."""
        limit = len(self.token_ids) - 1
        pooling = self.group.source.pooling
        if pooling is not None and pooling.needs_all_states:
            return 0
        if self.prompt_logprobs is not None:
            return min(limit, len(self.prompt_logprobs) - 1)
        return limit

    def hashes_upto(self, num_blocks: int) -> list[BlockHash]:
        """Hashes of the first ``num_blocks`` full blocks, as far as tokens are known. To read
        only: the list may be the request's own."""
        hashes = self.block_hashes
        if len(hashes) < num_blocks:
            group, embeds = self.group, self.group.source.prompt_embeds
            extend_hashes(hashes, group.root, self.token_ids, group.block_size, embeds)
        return hashes if len(hashes) <= num_blocks else hashes[:num_blocks]

    def as_new(self) -> NewSequence:
        """All that a rank must know of it."""
        params = self.params
        if params.prompt_logprobs is not None and self.prompt_logprobs is None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)  # told already
        embeds = self.group.source.prompt_embeds
        has_ids = embeds is None
        if self.num_computed >= self.num_prompt:
            embeds = None  # nothing of the prompt is computed for this row any more
        return NewSequence(
            seq=self.seq,
            token_ids=self.token_ids.copy(),
            num_prompt=self.num_prompt,
            params=params,
            choice=self.choice,
            eos_token_ids=self.group.source.eos_token_ids,
            block_ids=self.block_ids.copy(),
            pooling=self.group.source.pooling,
            embeds=embeds,
            has_ids=has_ids,
        )
