"""Facts of a prompt and of the fleet at one moment: the input of placement."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import DecodeBatch, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """Request to place."""

    num_tokens: int
    """Tokens of the prompt and of the answer so far."""
    max_new_tokens: int | None = None
    """Maximum number of further tokens."""
    num_choices: int = 1
    whole: bool = False
    """Whether no hand-off can serve it."""
    one_token: bool = False
    """Whether it ends with its next token."""
    pooled: bool = False
    query_key: str | None = None
    """Key of a query that one worker keeps."""
    fingerprint: str | None = None
    """Digest of compatible workers; None before a token was emitted."""
    shape: str | None = None
    """``disaggregated`` or ``aggregated`` if only that is allowed."""
    revisions: Mapping[WorkerRole, str] = field(default_factory=dict)
    """Required revisions by role, admitted or not."""
    hits: Mapping[Incarnation, int] = field(default_factory=dict)
    """Cached tokens of the prompt by worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """Worker that is up."""

    incarnation: Incarnation
    role: WorkerRole
    fingerprint: str
    """Digest of workers with compatible KV."""
    name: str
    max_model_len: int
    max_num_seqs: int
    max_handoff_tokens: int | None = None
    """Maximum prompt tokens of a hand-off; None: no limit."""
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    loading_tokens: int = 0
    """Waiting tokens whose KV comes from another worker."""
    prefill_tokens_per_s: float = 0.0
    """Measured over the last steps; 0 if unknown."""
    num_decoding: int = 0
    context_tokens: int = 0
    """Context of those, in tokens."""
    decode_steps: StepTimes = ()
    """Seconds of steps by number of decodes, without contexts."""
    context_s: float = 0.0
    """Seconds per token of a decode's context; 0 if unknown."""
    prompt_steps: StepTimes = ()
    """Seconds of prompt tokens by their number, at a prompt's start."""
    mixed_steps: StepTimes = ()
    """Seconds that they add to a step of decodes; empty if unknown."""
    steepness: float = 0.0
    """Relative increase of a prompt token's time per token before it."""
    chunk_tokens: int = 0
    """Prompt tokens of its next step; 0 if unknown."""
    mixed_chunk_tokens: int = 0
    """Prompt tokens of a step with decodes; 0 if unknown."""
    bounds_steps: bool = False
    """Whether mixed steps have a bound of time: fewer tokens fit after a long context."""
    residence_s: float = 0.0
    """Mean seconds that a request holds its blocks; 0 if unknown."""
    prompt_share: float = 0.0
    """Recent share of prompts in its time, 0 to 1."""
    prompts_per_s: float = 0.0
    total_blocks: int = 0
    """Spans of ``block_size`` tokens of a long prompt; 0 if unknown."""
    free_blocks: int = 0
    block_size: int = 16
    token_bytes: float = 0.0
    free_share: float = 1.0
    num_legs: int = 0
    """Legs of this router, known without a report."""
    num_streams: int = 0
    """Legs with an output that continue."""
    leg_tokens: int = 0
    """Prompt tokens of legs without an output."""
    leg_compute_tokens: int = 0
    """Those tokens that the worker computes itself."""
    leg_prompts: int = 0
    draining: bool = False
    revision: str = ""
    """Revision of its role in a cluster."""
    admitted: bool = True
    pools: bool = True
    takes_embeds: bool = False
    suspect: bool = False
    """Whether it failed recently by its own fault: the last choice."""

    @property
    def pending_tokens(self) -> int:
        """Return the prompt tokens before a new request, reported or sent since."""
        return max(self.waiting_tokens, self.leg_tokens)

    @property
    def compute_tokens(self) -> int:
        """Return the prompt tokens that it computes before a new request's."""
        return max(self.waiting_tokens - self.loading_tokens, self.leg_compute_tokens)

    @property
    def mean_waiting(self) -> float:
        """Return the mean tokens of a waiting prompt; 0 without any."""
        if self.leg_prompts:
            return self.leg_tokens / self.leg_prompts
        return self.waiting_tokens / self.num_waiting if self.num_waiting else 0.0

    @property
    def decode_batch(self) -> DecodeBatch:
        """Return its decodes, reported or known since."""
        streams, known = max(self.num_decoding, self.num_streams), self.num_decoding
        return DecodeBatch(streams, self.context_tokens * streams // known if known else 0)

    @property
    def num_requests(self) -> int:
        """Return its requests, reported or sent since."""
        return max(self.num_running + self.num_waiting, self.num_legs)


@dataclass(frozen=True, slots=True)
class LinkThroughput:
    """Throughput of a link, as its second end measured it."""

    bytes_per_s: float = 0.0
    """0 if unknown."""
    waiting_bytes: int = 0
    probed_bytes_per_s: float = 0.0
    """Rate of the link's probe, for pulls while its rate is unknown."""

    @property
    def wait(self) -> float:
        """Return the seconds until the waiting bytes are received; 0 if unknown."""
        return self.waiting_bytes / self.bytes_per_s if self.bytes_per_s else 0.0


UNUSED = LinkThroughput()
"""Throughput of a link that was not measured."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests of the last second, which no report includes yet."""

    prompts_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Uncached prompt tokens per second."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Workers and hand-off links that are up."""

    workers: tuple[WorkerView, ...]
    links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    """(prefill, decode) pairs whose link is up and not quarantined."""
    paces: Mapping[tuple[Incarnation, Incarnation], LinkThroughput] = field(default_factory=dict)
    pull_links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    """(holder, puller) pairs over whose link a prefix may be pulled."""
    arrivals: Arrivals = Arrivals()

    def taking_embeds(self) -> FleetSnapshot:
        """Return the part of the fleet that accepts embeddings."""
        able = tuple(each for each in self.workers if each.takes_embeds)
        known = {each.incarnation for each in able}
        links = frozenset(pair for pair in self.links if known.issuperset(pair))
        pulls = frozenset(pair for pair in self.pull_links if known.issuperset(pair))
        return FleetSnapshot(able, links, self.paces, pulls, self.arrivals)


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Workers and links that a request must not use again."""

    workers: frozenset[Incarnation] = frozenset()
    prefill: frozenset[Incarnation] = frozenset()
    """Prefill workers that must not hand it over."""
    pairs: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    no_handoff: bool = False

    def but_for(self, workers: Set[Incarnation]) -> Exclusions:
        return replace(self, workers=self.workers - workers)


FULL_SHARE = 0.05
"""Share of free blocks below which a worker is about to preempt."""
UNKNOWN_RESIDENCE = 1.0
"""Assumed seconds that a request holds its blocks."""


def usable_workers(
    prompt: PromptFacts, fleet: FleetSnapshot, exclusions: Exclusions
) -> list[WorkerView]:
    """Return the workers that may serve the prompt, alone or in a pair."""
    return [
        worker
        for worker in fleet.workers
        if not worker.draining
        and _serves_revision(prompt, worker)
        and prompt.num_tokens + (not prompt.pooled) <= worker.max_model_len
        and worker.incarnation not in exclusions.workers
        and prompt.fingerprint in (None, worker.fingerprint)
        and (worker.pools or not prompt.pooled)
    ]


def may_hand_over(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Return whether the prompt is within the worker's limit of hand-offs."""
    limit = worker.max_handoff_tokens
    return limit is None or prompt.num_tokens <= limit


def linked(
    producer: WorkerView, consumer: WorkerView, fleet: FleetSnapshot, exclusions: Exclusions
) -> bool:
    """Return whether the link between them is up and not excluded."""
    pair = (producer.incarnation, consumer.incarnation)
    return (
        producer.fingerprint == consumer.fingerprint
        and pair in fleet.links
        and pair not in exclusions.pairs
    )


def fitting(prompt: PromptFacts, workers: list[WorkerView]) -> list[WorkerView]:
    """Return the workers whose empty cache holds the prompt and a token.

    If there is none, return all: they refuse it with the reason.
    """
    return [each for each in workers if _fits(prompt, each)] or workers


def long_enough(prompt: PromptFacts, workers: list[WorkerView]) -> list[WorkerView]:
    """Return the workers whose context holds the whole answer, or all."""
    whole = prompt.num_tokens + (prompt.max_new_tokens or 0)
    return [each for each in workers if whole <= each.max_model_len] or workers


def uncached(prompt: PromptFacts, worker: WorkerView) -> int:
    """Return the tokens that the worker would have to compute, at least one."""
    return max(1, prompt.num_tokens - prompt.hits.get(worker.incarnation, 0))


def is_full(worker: WorkerView) -> bool:
    """Return whether the worker is about to preempt."""
    return worker.free_share < FULL_SHARE and worker.num_requests > 0


def wait_for_room(prompt: PromptFacts, worker: WorkerView) -> float:
    """Return the seconds until blocks and a seat are free."""
    if not worker.total_blocks:
        return 0.0
    blocks = -(-(uncached(prompt, worker) + worker.pending_tokens) // worker.block_size) + 1
    used = max(1, worker.total_blocks - worker.free_blocks)
    lacking = max(0, blocks - worker.free_blocks) / used
    seats = max(0, worker.num_requests + 1 - worker.max_num_seqs) / max(1, worker.max_num_seqs)
    return max(lacking, seats) * (worker.residence_s or UNKNOWN_RESIDENCE)


def _serves_revision(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Return whether the worker's revision serves users, or is a canary's."""
    wanted = prompt.revisions.get(worker.role)
    return worker.admitted if wanted is None else worker.revision == wanted


def _fits(prompt: PromptFacts, worker: WorkerView) -> bool:
    if prompt.pooled or not worker.total_blocks:
        return True
    return prompt.num_tokens < worker.total_blocks * worker.block_size
