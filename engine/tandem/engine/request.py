"""Requests of the scheduler: one ``Request`` per choice, one ``RequestGroup`` per key.

A prompt with n choices starts as one Request that samples n first tokens and is then forked; a
resumed one starts as a Request for each choice that has not ended. Each field is written by its
owners only. ``KVCacheManager`` writes those of blocks and ``Updater`` tokens; ``RequestTable`` and
``RemoteKV`` write state and place. ``num_computed`` is written by ``Planner`` as it drafts, by
``RemoteKV`` as KV comes, by ``Updater`` for a fork, by ``RequestTable`` for a preemption, and by
``Constrained`` for a late mask.
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
    """State of a Request; each has one owner."""

    WAITING = "waiting"
    """Queued, never computed."""
    GATED = "gated"
    """Waiting for a resource that is made or fetched for it; in no queue, nothing is reserved."""
    WAITING_FOR_REMOTE_KVS = "remote"
    """Parked: its KV comes from elsewhere, nothing is reserved."""
    LOADING = "loading"
    """Blocks are reserved and being written by the connector."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Back in the queue without blocks, to be computed again."""
    FINISHED = "finished"


class Gate(Protocol):
    """A condition that requests wait for; called by the scheduler in its step loop; never blocks.
    Order for one sequence: ``admit``, then ``failed`` and ``ready`` until one is set, ``enter``,
    and ``release`` at its end in any case. A preemption changes nothing."""

    @property
    def seconds(self) -> float:
        """Return the seconds that a request may wait here."""
        ...

    @property
    def is_preparing(self) -> bool:
        """Return whether the gate is making what all requests share: no request is charged with
        that time."""
        ...

    def asks(self, source: EngineCoreRequest) -> bool:
        """Return whether a request has to pass here; if not, no other method is called for it."""
        ...

    def admit(self, request: Request) -> Refusal | None:
        """Begin the slow work, or return a refusal; then nothing is held."""
        ...

    def waits(self, request: Request) -> bool:
        """Return whether work for other requests is done first: such waiting is not charged."""
        ...

    def failed(self, request: Request) -> Refusal | None:
        """Return a refusal if the gate never opens, which ends the request."""
        ...

    def ready(self, request: Request) -> bool:
        """Return whether it is open."""
        ...

    def overdue(self, request: Request) -> Refusal:
        """Return the refusal after ``seconds`` of waiting, for other requests or its own work."""
        ...

    def enter(self, request: Request) -> None:
        """Give the request its resource; all gates are open."""
        ...

    def forked(self, parent: Request, child: Request) -> None:
        """Give ``child``, which continues from ``parent``'s position, the same resource."""
        ...

    def release(self, request: Request) -> None:
        """Release the resource of a request that ended or was never admitted."""
        ...

    def close(self) -> None:
        """End with the engine. May be called twice."""
        ...


class TokenConstraint(Protocol):
    """Allowed tokens of a request, which a gate may set as ``Request.constraint``. A mask is made
    after each token, and the next token is sampled after that. Methods raise TandemError if the
    tokens cannot be followed."""

    @property
    def mask(self) -> bytes | bytearray:
        """Return the next token's mask, a row of ``TokenMasks.words``; valid once ``is_ready``."""
        ...

    @property
    def is_dead(self) -> bool:
        """Return whether no token may come next; valid once ``is_ready``."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Return whether the answer so far can only end."""
        ...

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Return whether the next token's mask is made, after a wait of at most ``seconds``."""
        ...

    def call_when_ready(self) -> None:
        """Wake the step loop once the mask is made: until then it is not polled."""
        ...

    def accept(self, token: int, *, last: bool = False) -> bool:
        """Extend the answer by ``token``, maybe its ``last``; return whether it can only end."""
        ...

    def ends_with(self, token: int) -> bool:
        """Return whether the answer could only end after ``token``, which is not added."""
        ...

    def fork(self) -> Self:
        """Return a constraint for another choice, in the same state."""
        ...

    def drop(self) -> object:
        """End with the request; return what is left for the gate."""
        ...

    def refusal(self, words: str) -> Refusal:
        """Return the refusal of a request whose tokens cannot be followed further."""
        ...


@dataclass(slots=True, eq=False)
class RequestGroup:
    """One EngineCoreRequest until all its choices have ended."""

    source: EngineCoreRequest
    root: BlockHash
    """Parent of the first block's hash."""
    block_size: int
    arrival: float
    """Seconds on the engine's clock."""
    number: int
    """Number of its arrival."""
    turn: int
    """Start tag in the order of tenants."""
    deadline: float | None
    """Seconds on the engine's clock."""
    max_model_len: int
    """Prompt and output tokens at which a choice ends by length."""
    gates: tuple[Gate, ...] = ()
    """Gates that its sequences wait at, or whose resources they hold until they end."""
    live: dict[int, Request] = field(default_factory=dict)
    """Requests by choice; a fork's choices are added by the fork."""
    cut: set[int] = field(default_factory=set)
    """Choices that end with their next token: their reader has found their end."""
    scheduled: float | None = None
    """Time at which its first tokens were planned."""
    first_token: float | None = None
    num_generated: int = 0
    num_preemptions: int = 0
    num_hit: int = 0
    """Tokens found in the prefix cache at the first start, for the first choice."""
    num_computed_prompt: int = 0
    """Prompt tokens planned to be computed here; again after a preemption is not counted."""
    notes: NoteBook | None = None
    """Notes of its times, if requested."""

    @property
    def key(self) -> RequestKey:
        """Return the identity of the attempt."""
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
        "num_output_placeholders",
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
        """``choices`` are sampled at the end of the prefill; the first stays with this Request. A
        pooled request samples none, and waits for its vector as other requests for a token."""
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
        """Prompt, forced and generated tokens known to the host."""
        self.num_prefill = len(token_ids)
        """Tokens known at its arrival: prompt and forced ones."""
        self.num_generated = 0
        self.num_computed = 0
        """Tokens whose KV is written once all planned steps are done."""
        self.num_output_placeholders = 0
        """Tokens that planned steps will sample, not yet known here."""
        self.max_len = max_len
        """Tokens of prompt and output at which it ends: by max_tokens or by the context."""
        ends_with_first = len(self.choices) != 1 or isinstance(group.source.kv, Produce)
        self.plan_limit = self.num_prefill + 1 if ends_with_first else max_len
        """Number of known and pending tokens from which on no step is planned."""
        self.enders: Container[int] = frozenset(eos) | frozenset(params.stop_token_ids)
        """Tokens that may end it; ``finish_of`` decides."""
        self.constraint: TokenConstraint | None = None
        """Constraint on the tokens; ``enders`` is then ``EVERY_TOKEN``, and ``plan_limit`` is 0
        while the next mask is late."""
        self.block_ids: list[int] = []
        self.block_hashes = block_hashes
        self.capacity = 0
        """Tokens that the blocks can hold."""
        self.num_cached_blocks = 0
        """Blocks that are hits or have been offered to the prefix cache."""
        self.cache_due = sys.maxsize
        """Tokens at which one more block can be cached."""
        self.num_announced = 0
        """Prompt tokens reported to the connector."""
        # Choices without a seat after their prompt count as preempted, too.
        self.num_preemptions, self.preempted_for_tenant = 0, False
        self.state = RequestState.WAITING
        self.on_rank = False
        """True if the ranks hold a row of it."""
        self.remote_done = False
        """True if the connector has given its final answer on the source of the KV."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if self._scores_prompt() else None
        )
        """Scores joined so far; None if not requested, or already sent."""
        self.last_token_at = 0.0

    def _scores_prompt(self) -> bool:
        """Return whether its prompt's log-probabilities are requested and not yet sent."""
        untold = self.num_prefill == self.num_prompt and not isinstance(self.kv, Consume)
        return self.params.prompt_logprobs is not None and untold

    def __repr__(self) -> str:
        return f"Request({self.seq}, {self.key}, choice={self.choice}, {self.state.value})"

    @property
    def key(self) -> RequestKey:
        """Return the identity of its attempt."""
        return self.group.source.key

    @property
    def source(self) -> EngineCoreRequest:
        """Return the message that it came in."""
        return self.group.source

    @property
    def tenant(self) -> str:
        """Return the tenant that it is computed for."""
        return self.group.source.tenant

    @property
    def kv(self) -> Produce | Consume | None:
        """Return its half of a hand-off, if any."""
        return self.group.source.kv

    @property
    def leads(self) -> bool:
        """Return whether it is the first of its request's sequences that have not ended."""
        return next(iter(self.group.live.values()), self) is self

    @property
    def preemptible(self) -> bool:
        """Return whether its blocks may be taken: a producer's are promised to a peer."""
        return not isinstance(self.group.source.kv, Produce)

    @property
    def num_tokens(self) -> int:
        """Return the number of known tokens and those that steps in flight will sample."""
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_output(self) -> int:
        """Return the number of known tokens after the prompt, forced ones included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Return the number of tokens that no planned step computes."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed

    @property
    def finished(self) -> bool:
        """Return whether the scheduler has ended it."""
        return self.state is RequestState.FINISHED

    @property
    def max_cached_tokens(self) -> int:
        """Return how many tokens may come from the prefix cache: at least one is computed for its
        logits. Prompt logprobs require the logits of each position that is still missing. Pooling
        of more than the last token requires hidden states, which are not cached."""
        limit = len(self.token_ids) - 1
        pooling = self.group.source.pooling
        if pooling is not None and pooling.needs_all_states:
            return 0
        if self.prompt_logprobs is not None:
            return min(limit, len(self.prompt_logprobs) - 1)
        return limit

    def hashes_upto(self, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the first ``num_blocks`` full blocks, as far as tokens are known.
        The list may be the request's own: do not change it."""
        hashes = self.block_hashes
        if len(hashes) < num_blocks:
            group, embeds = self.group, self.group.source.prompt_embeds
            extend_hashes(hashes, group.root, self.token_ids, group.block_size, embeds)
        return hashes if len(hashes) <= num_blocks else hashes[:num_blocks]

    def as_new(self) -> NewSequence:
        """Return all its data for a rank."""
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
