"""Requests of the scheduler: one ``Request`` per choice, one ``RequestGroup`` per key.

A prompt with n choices starts as one Request, samples n first tokens and is forked; a resumed one
starts as one Request per open choice. Each field has one writer: ``KVCacheManager`` blocks,
``Updater`` tokens, ``RequestTable`` and ``RemoteKV`` state and place. Several advance
``num_computed``.
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
"""(priority, tag of the tenant's turn, arrival, choice), unique in one engine; smaller goes first.
"""


class RequestState(Enum):
    """State of a Request; each has one owner."""

    WAITING = "waiting"
    """Queued, never computed."""
    GATED = "gated"
    """Waiting at a gate, in no queue, without blocks."""
    WAITING_FOR_REMOTE_KVS = "remote"
    """Parked, as its KV comes from elsewhere; without blocks."""
    LOADING = "loading"
    """The connector is writing its blocks."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Queued again without blocks, to be recomputed."""
    FINISHED = "finished"


class Gate(Protocol):
    """Condition that requests wait for; never blocks the step loop.

    Order of calls: ``admit``, ``failed`` and ``ready`` until one is set, ``enter``; ``release`` in
    any case. A preemption changes nothing.
    """

    @property
    def seconds(self) -> float:
        """Return the longest wait of a request in seconds."""
        ...

    @property
    def is_preparing(self) -> bool:
        """Return whether the gate prepares a resource of all requests. This wait is not charged."""
        ...

    def asks(self, source: EngineCoreRequest) -> bool:
        """Return whether a request must pass here; if not, no other method is called for it."""
        ...

    def admit(self, request: Request) -> Refusal | None:
        """Begin the slow work, or return a refusal."""
        ...

    def waits(self, request: Request) -> bool:
        """Return whether work for other requests is done first: this wait is not charged."""
        ...

    def failed(self, request: Request) -> Refusal | None:
        """Return a refusal if the gate never opens, which ends the request."""
        ...

    def ready(self, request: Request) -> bool: ...

    def overdue(self, request: Request) -> Refusal:
        """Return the refusal after ``seconds`` of waiting."""
        ...

    def enter(self, request: Request) -> None:
        """Assign the resource to the request; all gates are open."""
        ...

    def forked(self, parent: Request, child: Request) -> None:
        """Assign the resource to ``child``, which continues from ``parent``'s position."""
        ...

    def release(self, request: Request) -> None:
        """Release the resource of a request that ended or was never admitted."""
        ...

    def close(self) -> None:
        """End with the engine. May be called twice."""
        ...


class TokenConstraint(Protocol):
    """Allowed tokens of a request, set by a gate as ``Request.constraint``.

    After each token the next mask is made. Methods raise TandemError if the tokens cannot be
    followed.
    """

    @property
    def mask(self) -> bytes | bytearray:
        """Return the next token's mask, a row of ``TokenMasks.words``; requires ``is_ready``."""
        ...

    @property
    def is_dead(self) -> bool:
        """Return whether no token is allowed next; requires ``is_ready``."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Return whether the answer so far can only end."""
        ...

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Return whether the next mask is made, after a wait of at most ``seconds``."""
        ...

    def call_when_ready(self) -> None:
        """Wake the step loop once the mask is made."""
        ...

    def accept(self, token: int, *, last: bool = False) -> bool:
        """Extend the answer by ``token``; return whether it can only end. ``last``: no token
        follows."""
        ...

    def ends_with(self, token: int) -> bool:
        """Return whether the answer could only end after ``token``, which is not added."""
        ...

    def fork(self) -> Self:
        """Return a constraint for another choice, in the same state."""
        ...

    def drop(self) -> object:
        """End with the request; return the resources that the gate keeps."""
        ...

    def refusal(self, words: str) -> Refusal: ...


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
    turn: int
    """Start tag in the order of tenants."""
    deadline: float | None
    """Seconds on the engine's clock."""
    max_model_len: int
    gates: tuple[Gate, ...] = ()
    """Gates that its sequences wait at, or whose resources they hold."""
    live: dict[int, Request] = field(default_factory=dict)
    """Requests by choice; a fork adds its choices."""
    cut: set[int] = field(default_factory=set)
    """Choices that end with their next token, as their reader has found the end."""
    scheduled: float | None = None
    """Time at which its first tokens were planned."""
    first_token: float | None = None
    num_generated: int = 0
    num_preemptions: int = 0
    num_hit: int = 0
    """Tokens found in the prefix cache at the first start, for the first choice."""
    num_computed_prompt: int = 0
    """Prompt tokens planned to be computed here, without recomputation."""
    notes: NoteBook | None = None

    @property
    def key(self) -> RequestKey:
        return self.source.key


class Request:
    """One sequence: the prompt and the tokens of one choice."""

    __slots__ = (
        "attempt",
        "block_hashes",
        "block_tables",
        "cache_due",
        "cacheable_from",
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
        "num_pending_drafts",
        "num_preemptions",
        "num_prefill",
        "num_prompt",
        "num_proposed",
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
        "window_starts",
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
        """``choices`` are sampled at the end of the prefill; the first keeps this Request. A pooled
        request waits for its vector instead of a token."""
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
        self.num_generated = self.num_computed = 0
        """Tokens whose KV is written once all planned steps are done, if they accept all drafts."""
        self.num_output_placeholders = 0
        """Tokens that planned steps will sample, accepted drafts included."""
        self.max_len = max_len
        """Tokens of prompt and output at which it ends by length."""
        ends_with_first = len(self.choices) != 1 or isinstance(group.source.kv, Produce)
        self.plan_limit = self.num_prefill + 1 if ends_with_first else max_len
        """Number of known and pending tokens from which no step is planned."""
        self.enders: Container[int] = frozenset(eos) | frozenset(params.stop_token_ids)
        """Tokens that may end it; ``finish_of`` decides."""
        self.constraint: TokenConstraint | None = None
        """Constraint on the tokens; ``enders`` is then ``EVERY_TOKEN``, and ``plan_limit`` 0 while
        the next mask is late."""
        self.block_tables: list[list[int]] = []
        """Blocks by group of the layout."""
        self.window_starts, self.cacheable_from = list[int](), list[int]()
        """By table: the first held entry, as earlier ones have left the window, and the first whose
        block may be cached."""
        self.block_hashes = block_hashes
        self.capacity, self.num_cached_blocks = 0, 0
        """Tokens that the blocks can hold; entries of each table that are hits or have been offered
        to the prefix cache."""
        self.cache_due = sys.maxsize
        """Tokens at which one more block can be cached."""
        self.num_announced = self.num_pending_drafts = self.num_proposed = 0
        """Prompt tokens reported to the connector; drafts in planned steps; drafts that ranks have
        proposed since they have its row."""
        # Choices without a seat after their prompt count as preempted, too.
        self.num_preemptions, self.preempted_for_tenant = 0, False
        self.state = RequestState.WAITING
        self.on_rank = False
        """Whether the ranks have a row for the sequence."""
        self.remote_done = False
        """Whether the connector has given its final answer."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if self._scores_prompt() else None
        )
        """Scores joined so far; None if not requested, or already sent."""
        self.last_token_at = 0.0

    def _scores_prompt(self) -> bool:
        unsent = self.num_prefill == self.num_prompt and not isinstance(self.kv, Consume)
        return self.params.prompt_logprobs is not None and unsent

    def __repr__(self) -> str:
        return f"Request({self.seq}, {self.key}, choice={self.choice}, {self.state.value})"

    @property
    def key(self) -> RequestKey:
        return self.group.source.key

    @property
    def source(self) -> EngineCoreRequest:
        return self.group.source

    @property
    def tenant(self) -> str:
        return self.group.source.tenant

    @property
    def kv(self) -> Produce | Consume | None:
        return self.group.source.kv

    @property
    def leads(self) -> bool:
        """Return whether it is the first of its request's live sequences."""
        return next(iter(self.group.live.values()), self) is self

    @property
    def preemptible(self) -> bool:
        """Return whether its blocks may be taken: a producer's are promised to a peer."""
        return not isinstance(self.group.source.kv, Produce)

    @property
    def num_blocks(self) -> int:
        """Return the number of held blocks over all groups."""
        return sum(map(len, self.block_tables)) - sum(self.window_starts)

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
        return self.state is RequestState.FINISHED

    @property
    def max_cached_tokens(self) -> int:
        """Return how many tokens may come from the prefix cache. One is computed for its logits;
        prompt logprobs and some poolings require more."""
        limit = len(self.token_ids) - 1
        pooling = self.group.source.pooling
        if pooling is not None and pooling.needs_all_states:
            return 0
        if self.prompt_logprobs is not None:
            return min(limit, len(self.prompt_logprobs) - 1)
        return limit

    def hashes_upto(self, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the first ``num_blocks`` full blocks of known tokens. Do not change
        the list."""
        hashes = self.block_hashes
        if len(hashes) < num_blocks:
            group, content = self.group, self.group.source.content
            extend_hashes(hashes, group.root, self.token_ids, group.block_size, content)
        return hashes if len(hashes) <= num_blocks else hashes[:num_blocks]

    def as_new(self) -> NewSequence:
        """Return all its data for a rank."""
        params = self.params
        if params.prompt_logprobs is not None and self.prompt_logprobs is None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)  # sent already
        source = self.group.source
        return NewSequence(
            seq=self.seq,
            token_ids=self.token_ids.copy(),
            num_prompt=self.num_prompt,
            params=params,
            choice=self.choice,
            eos_token_ids=source.eos_token_ids,
            block_ids=tuple(table.copy() for table in self.block_tables),
            has_ids=source.prompt_embeds is None,
            **source.inputs(computes_prompt=self.num_computed < self.num_prompt),
        )
