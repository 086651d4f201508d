"""Facts of a prompt and of the fleet at one moment, as plain values: the input of placement."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.protocol.steps import DecodeBatch, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """One request to place."""

    num_tokens: int
    """Tokens of the prompt and of the answer so far, which a prefill computes."""
    max_new_tokens: int | None = None
    """Tokens still to come, at most."""
    num_choices: int = 1
    whole: bool = False
    """True if no hand-off can serve it."""
    one_token: bool = False
    """True if it ends with its next token: a prefill worker does all of it."""
    pooled: bool = False
    """True if it ends with its prompt: a worker that pools does all of it."""
    query_key: str | None = None
    """Key of a query that one worker keeps: all requests with it are sent there."""
    fingerprint: str | None = None
    """Digest of workers that may exchange KV; None before a token was emitted."""
    shape: str | None = None
    """``disaggregated`` or ``aggregated`` if only that is allowed."""
    revisions: Mapping[WorkerRole, str] = field(default_factory=dict)
    """Revision by role that its workers must have, admitted or not."""
    hits: Mapping[Incarnation, int] = field(default_factory=dict)
    """Cached tokens of the prompt's prefix by worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker that is up."""

    incarnation: Incarnation
    role: WorkerRole
    fingerprint: str
    """Digest that is equal for workers that may exchange KV, for any block sizes."""
    name: str
    max_model_len: int
    max_num_seqs: int
    max_handoff_tokens: int | None = None
    """Tokens of the longest prompt that a prefill worker hands over; None: no limit."""
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    loading_tokens: int = 0
    """Waiting tokens whose KV is received from another worker."""
    prefill_tokens_per_s: float = 0.0
    """Measured over the last steps; 0 while unknown."""
    num_decoding: int = 0
    """Running sequences past their prompt."""
    context_tokens: int = 0
    """Context of those, in tokens, summed."""
    decode_steps: StepTimes = ()
    """Seconds of its steps by the number of their decodes, without those of contexts."""
    context_s: float = 0.0
    """Seconds for each token of a decode's context; 0 while unknown."""
    prompt_steps: StepTimes = ()
    """Seconds of prompt tokens by their number, at a prompt's start."""
    mixed_steps: StepTimes = ()
    """Seconds that they add to a step of decodes; empty while unknown."""
    steepness: float = 0.0
    """Share by which a prompt token takes longer for each token before it."""
    chunk_tokens: int = 0
    """Prompt tokens of its next step; 0 while unknown."""
    mixed_chunk_tokens: int = 0
    """Prompt tokens of a step with decodes; 0 while unknown."""
    bounds_steps: bool = False
    """True if steps with decodes have a bound of time: after a long context they hold fewer prompt
    tokens."""
    residence_s: float = 0.0
    """Mean seconds that a request holds its blocks; 0 while unknown."""
    prompt_share: float = 0.0
    """Share of its time that prompts took lately, 0 to 1."""
    prompts_per_s: float = 0.0
    """Prompts a second that it computed lately."""
    total_blocks: int = 0
    """0 while unknown."""
    free_blocks: int = 0
    block_size: int = 16
    token_bytes: float = 0.0
    """KV bytes of a token."""
    free_share: float = 1.0
    """Free KV blocks over all blocks."""
    num_legs: int = 0
    """Legs of this router; known at once, unlike the report."""
    num_streams: int = 0
    """Legs with an output that go on."""
    leg_tokens: int = 0
    """Prompt tokens of legs without an output."""
    leg_compute_tokens: int = 0
    """Tokens of those that the worker computes itself."""
    leg_prompts: int = 0
    """Number of legs in ``leg_tokens``."""
    draining: bool = False
    """True if it drains or sleeps: nothing new is placed there."""
    revision: str = ""
    """Revision of the role's template in a cluster."""
    admitted: bool = True
    """True if its revision serves users."""
    pools: bool = True
    """True if it computes vectors and scores."""
    takes_embeds: bool = False
    """True if it accepts prompts of embeddings."""
    suspect: bool = False
    """True if it failed by its own fault lately: the last choice."""

    @property
    def pending_tokens(self) -> int:
        """Return the prompt tokens before a new request, as reported or as sent since."""
        return max(self.waiting_tokens, self.leg_tokens)

    @property
    def compute_tokens(self) -> int:
        """Return the prompt tokens that it computes before a new request's."""
        return max(self.waiting_tokens - self.loading_tokens, self.leg_compute_tokens)

    @property
    def mean_waiting(self) -> float:
        """Return the mean tokens of a waiting prompt, of this router's or as reported; 0 without
        any."""
        if self.leg_prompts:
            return self.leg_tokens / self.leg_prompts
        return self.waiting_tokens / self.num_waiting if self.num_waiting else 0.0

    @property
    def decode_batch(self) -> DecodeBatch:
        """Return its decodes, as reported or as known since, with contexts like those reported."""
        streams, known = max(self.num_decoding, self.num_streams), self.num_decoding
        return DecodeBatch(streams, self.context_tokens * streams // known if known else 0)

    @property
    def num_requests(self) -> int:
        """Return its requests, as reported or as sent since."""
        return max(self.num_running + self.num_waiting, self.num_legs)


@dataclass(frozen=True, slots=True)
class LinkThroughput:
    """Pace of a link, as its second end measured it."""

    bytes_per_s: float = 0.0
    """0 while unknown."""
    waiting_bytes: int = 0
    probed_bytes_per_s: float = 0.0
    """Rate of the link's probe; used for pulls while its rate is unknown."""

    @property
    def wait(self) -> float:
        """Return the seconds until the waiting bytes have been received; 0 while unknown."""
        return self.waiting_bytes / self.bytes_per_s if self.bytes_per_s else 0.0


UNUSED = LinkThroughput()
"""Pace of a link that was not measured."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests of the last second or so, which no report includes yet."""

    prompts_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Prompt tokens a second that are not cached."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The workers and hand-off links that are up."""

    workers: tuple[WorkerView, ...]
    links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    """(prefill, decode) pairs that the decode worker reports up and that are not quarantined."""
    paces: Mapping[tuple[Incarnation, Incarnation], LinkThroughput] = field(default_factory=dict)
    pull_links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    """(holder, puller) pairs of any roles over whose link a cached prefix may be pulled."""
    arrivals: Arrivals = Arrivals()

    def taking_embeds(self) -> FleetSnapshot:
        """Return the part of the fleet that accepts prompts of embeddings."""
        able = tuple(each for each in self.workers if each.takes_embeds)
        known = {each.incarnation for each in able}
        links = frozenset(pair for pair in self.links if known.issuperset(pair))
        pulls = frozenset(pair for pair in self.pull_links if known.issuperset(pair))
        return FleetSnapshot(able, links, self.paces, pulls, self.arrivals)


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Workers and links that a request must not use again, by incarnation."""

    workers: frozenset[Incarnation] = frozenset()
    prefill: frozenset[Incarnation] = frozenset()
    """Prefill workers that must not hand it over."""
    pairs: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    no_handoff: bool = False

    def but_for(self, workers: Set[Incarnation]) -> Exclusions:
        """Return a copy that allows these workers again."""
        return replace(self, workers=self.workers - workers)


FULL_SHARE = 0.05
"""Share of free blocks below which a worker is about to preempt."""
UNKNOWN_RESIDENCE = 1.0
"""Seconds that a request is assumed to hold its blocks before one has ended."""


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
    """Return the workers whose empty cache holds the prompt and a token. If there is none, return
    all: they refuse it with the reason."""
    return [each for each in workers if _fits(prompt, each)] or workers


def long_enough(prompt: PromptFacts, workers: list[WorkerView]) -> list[WorkerView]:
    """Return the workers whose context holds the whole answer, or all if none does."""
    whole = prompt.num_tokens + (prompt.max_new_tokens or 0)
    return [each for each in workers if whole <= each.max_model_len] or workers


def uncached(prompt: PromptFacts, worker: WorkerView) -> int:
    """Return the tokens that the worker would have to compute; the last one always is."""
    return max(1, prompt.num_tokens - prompt.hits.get(worker.incarnation, 0))


def is_full(worker: WorkerView) -> bool:
    """Return whether the worker is about to preempt."""
    return worker.free_share < FULL_SHARE and worker.num_requests > 0


def wait_for_room(prompt: PromptFacts, worker: WorkerView) -> float:
    """Return the seconds until blocks and a seat are free. Both become free as requests end."""
    if not worker.total_blocks:
        return 0.0
    blocks = -(-(uncached(prompt, worker) + worker.pending_tokens) // worker.block_size) + 1
    used = max(1, worker.total_blocks - worker.free_blocks)
    lacking = max(0, blocks - worker.free_blocks) / used
    seats = max(0, worker.num_requests + 1 - worker.max_num_seqs) / max(1, worker.max_num_seqs)
    return max(lacking, seats) * (worker.residence_s or UNKNOWN_RESIDENCE)


def _serves_revision(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Return whether the worker is of a revision that serves users, or that a canary names."""
    wanted = prompt.revisions.get(worker.role)
    return worker.admitted if wanted is None else worker.revision == wanted


def _fits(prompt: PromptFacts, worker: WorkerView) -> bool:
    if prompt.pooled or not worker.total_blocks:
        return True
    return prompt.num_tokens < worker.total_blocks * worker.block_size
