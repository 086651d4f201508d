"""What placement sees: facts of a prompt and of the fleet, at one moment, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.protocol.steps import Crowd, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """One request that looks for its place."""

    num_tokens: int
    """Prompt and tokens already emitted: what a prefill has to cover."""
    max_new_tokens: int | None = None
    """Tokens still to come, at most."""
    num_choices: int = 1
    whole: bool = False
    """Must run on one worker: no hand-off can serve it."""
    one_token: bool = False
    """Ends with its next token, so a prefill worker can do all of it."""
    pooled: bool = False
    """Ends with its prompt: any worker that pools does all of it, and none hands anything over."""
    query_key: str | None = None
    """Goes where all of this key go: one of the workers keeps a query under it."""
    fingerprint: str | None = None
    """Only workers that may exchange KV under this digest; None before any token was emitted."""
    shape: str | None = None
    """Only ``disaggregated`` or only ``aggregated``; None lets the policy choose."""
    revisions: Mapping[WorkerRole, str] = field(default_factory=dict)
    """Only workers of these revisions, admitted or not; a role that is absent is free."""
    hits: Mapping[Incarnation, int] = field(default_factory=dict)
    """Tokens of the prompt's prefix that a worker has cached, as far as is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker that is up."""

    incarnation: Incarnation
    role: WorkerRole
    fingerprint: str
    """Digest, equal for workers that may exchange KV, whatever the sizes of their blocks."""
    name: str
    max_model_len: int
    max_num_seqs: int
    max_handoff_tokens: int | None = None
    """Tokens of the longest prompt that a prefill worker hands over; None: no further limit."""
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    loading_tokens: int = 0
    """Of the waiting tokens, those whose KV is to come from a prefill worker."""
    prefill_tokens_per_s: float = 0.0
    """Measured over the last steps; 0 while unknown."""
    num_decoding: int = 0
    """Running sequences past their prompt."""
    context_tokens: int = 0
    """Tokens before the next of each of those, all together."""
    decode_steps: StepTimes = ()
    """Seconds of its steps by the number of their decodes, without what contexts take."""
    context_s: float = 0.0
    """Seconds for each token of a decode's context there; 0 while unknown."""
    prompt_steps: StepTimes = ()
    """Seconds that prompt tokens take there, or add to a step, by their number, at a prompt's
    start."""
    beside_steps: StepTimes = ()
    """Seconds that they add there to a step of decodes; none is unknown."""
    steepness: float = 0.0
    """By what share a prompt's token takes longer there for each token before it."""
    chunk_tokens: int = 0
    """Prompt tokens that it takes in a step now; 0 while unknown."""
    mixed_chunk_tokens: int = 0
    """Prompt tokens that a step takes there beside decodes; 0 while unknown."""
    bounds_steps: bool = False
    """Whether those keep a step within a time: behind a long context they are fewer."""
    residence_s: float = 0.0
    """Mean seconds that a request holds its blocks; 0 while unknown."""
    prompt_share: float = 0.0
    """Of its time, what prompts took lately, 0 to 1."""
    prompts_per_s: float = 0.0
    """Prompts that it computed lately, a second."""
    total_blocks: int = 0
    """0 while unknown."""
    free_blocks: int = 0
    block_size: int = 16
    token_bytes: float = 0.0
    """KV bytes of a token."""
    free_share: float = 1.0
    """Free KV blocks over all of them."""
    num_legs: int = 0
    """Legs that this router has under way there; known at once, unlike the report."""
    num_streams: int = 0
    """Of them, those that have spoken and go on."""
    leg_tokens: int = 0
    """Prompt tokens of those legs that nothing came for yet."""
    leg_compute_tokens: int = 0
    """Of the legs' tokens, those that the worker computes itself."""
    leg_prompts: int = 0
    """Legs that ``leg_tokens`` are of."""
    draining: bool = False
    """Whether nothing new may be placed there: it leaves, or sleeps."""
    revision: str = ""
    """Of the role's template, where a cluster says it."""
    admitted: bool = True
    """Whether the worker's revision serves users."""
    pools: bool = True
    """Whether it gives vectors and scores."""
    takes_embeds: bool = False
    """Whether it takes prompts of embeddings."""
    suspect: bool = False
    """Failed by its own fault lately: last choice."""

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens before a new request's turn: as reported, or as sent since."""
        return max(self.waiting_tokens, self.leg_tokens)

    @property
    def compute_tokens(self) -> int:
        """Prompt tokens that it computes before a new request's: as reported, or as sent since."""
        return max(self.waiting_tokens - self.loading_tokens, self.leg_compute_tokens)

    @property
    def mean_waiting(self) -> float:
        """Tokens of a prompt that waits there, in the mean: of this router's, or as reported; 0
        where none does."""
        if self.leg_prompts:
            return self.leg_tokens / self.leg_prompts
        return self.waiting_tokens / self.num_waiting if self.num_waiting else 0.0

    @property
    def crowd(self) -> Crowd:
        """What decodes there: as reported, or as heard since, with contexts like those reported."""
        streams, known = max(self.num_decoding, self.num_streams), self.num_decoding
        return Crowd(streams, self.context_tokens * streams // known if known else 0)

    @property
    def num_requests(self) -> int:
        """Requests there: as reported, or as sent since."""
        return max(self.num_running + self.num_waiting, self.num_legs)


@dataclass(frozen=True, slots=True)
class LinkPace:
    """How a hand-off link does, as its decode worker measured it."""

    bytes_per_s: float = 0.0
    """0 while unknown."""
    waiting_bytes: int = 0
    probed_bytes_per_s: float = 0.0
    """Of the pattern with which the link began; stands in for a pace that is unknown, of pulls."""

    @property
    def wait(self) -> float:
        """Seconds until what waits there has come; 0 while unknown."""
        return self.waiting_bytes / self.bytes_per_s if self.bytes_per_s else 0.0


UNUSED = LinkPace()
"""Of a link of which nothing was measured."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What a router was asked for in the last second or so, which no report can say yet."""

    prompts_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Of prompts, without what a cache had."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All workers that are up and the hand-off links that work."""

    workers: tuple[WorkerView, ...]
    links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    """(prefill, decode) pairs that the decode worker calls up and that are not quarantined."""
    paces: Mapping[tuple[Incarnation, Incarnation], LinkPace] = field(default_factory=dict)
    pull_links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    """(holder, puller) pairs of any roles, by whose link a cached prefix may be pulled."""
    arrivals: Arrivals = Arrivals()

    def taking_embeds(self) -> FleetSnapshot:
        """Of these those that take prompts of embeddings."""
        able = tuple(each for each in self.workers if each.takes_embeds)
        known = {each.incarnation for each in able}
        links = frozenset(pair for pair in self.links if known.issuperset(pair))
        pulls = frozenset(pair for pair in self.pull_links if known.issuperset(pair))
        return FleetSnapshot(able, links, self.paces, pulls, self.arrivals)


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Where a request must not go again, by incarnation."""

    workers: frozenset[Incarnation] = frozenset()
    prefill: frozenset[Incarnation] = frozenset()
    """Not to be handed off from; may be nothing else for a prefill worker."""
    pairs: frozenset[tuple[Incarnation, Incarnation]] = frozenset()
    no_handoff: bool = False

    def but_for(self, workers: Set[Incarnation]) -> Exclusions:
        """Exclusions with these workers allowed again."""
        return replace(self, workers=self.workers - workers)
