"""Settings of the scheduler."""

from dataclasses import dataclass

from tandem.base.settings import (
    check_choices,
    check_flag,
    check_integer,
    check_optional_integer,
    check_positive,
    check_share,
    setting,
)
from tandem.engine.config.speculative import (
    MOST_DRAFTED_SEQS,
    MOST_DRAFTS,
    MOST_SPECULATIVE_TOKENS,
    DraftSource,
    lookup_of,
)

GPU_BATCHED_TOKENS = 8192
GPU_IDLE_POLL_MS = 20
GPU_MIXED_TOKENS_PER_DECODE = 8
GPU_LEAST_MIXED_TOKENS = 1024
CPU_MIXED_TOKENS_PER_DECODE = 4
CPU_LEAST_MIXED_TOKENS = 64
CPU_NUM_SEQS = 48
MOST_REPLAYED = 128
"""Upper bound of ``replay_check_tokens``: a step has no more drafts."""
LEAST_CHUNK_TOKENS = 64
"""Prompt tokens that a mixed step may hold for any ``max_itl_ms``."""

PROMPT_CUTS = (
    "lone_prefill_token_threshold",
    "max_num_begun_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queue before it."""

    max_num_seqs: int = setting(
        256,
        "Maximum number of sequences in a step; a request with n choices counts n. "
        f"Default on CPUs: {CPU_NUM_SEQS}.",
        unit="sequences",
    )
    max_num_batched_tokens: int = setting(
        2048,
        "Maximum number of tokens in a step, prefill chunks and decodes together. "
        f"Default on GPUs: {GPU_BATCHED_TOKENS}.",
        unit="tokens",
    )
    mixed_tokens_per_decode: int | None = None
    """Tokens of a step with decodes, for each decode; None: no bound."""
    least_mixed_tokens: int | None = None
    """Minimum tokens of a step with decodes that ``mixed_tokens_per_decode`` allows."""
    max_itl_ms: float | None = setting(
        None,
        "Target time of a step with decodes. The step gets as many prompt tokens as fit, "
        f"at least {LEAST_CHUNK_TOKENS}. Default: no target.",
        unit="ms",
    )
    long_prefill_token_threshold: int | None = setting(
        None,
        "Maximum number of prompt tokens of one request in a step. Default: no limit.",
        unit="tokens",
    )
    lone_prefill_token_threshold: int | None = None
    """Prompt tokens of one request in one step while no other prompt waits or is in the step; None
    is ``long_prefill_token_threshold``."""
    max_num_begun_tokens: int | None = None
    """Prompt tokens of requests that begin in one step, together; None: no limit. If they begin one
    after the other, the first are done sooner."""
    policy: str = setting(
        "fcfs",
        "fcfs: by arrival. priority: by the request's priority (lower first), then arrival.",
        choices=("fcfs", "priority"),
    )
    max_num_queued_reqs: int | None = None
    """Requests that wait for their first step; more are refused. None: no limit. Workers have
    QUEUE_LIMITS."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens that wait for their first step; more are refused. None: no limit."""
    replay_check_tokens: int = 16
    """Emitted tokens of a resumed request, the last ones, that are sampled again and compared
    (tandem:resume_replayed_tokens_total). The emitted tokens stand in any case."""
    speculative_config: str | None = setting(
        None,
        "Drafts as JSON in vLLM's spelling: method (ngram), num_speculative_tokens (1 to "
        f"{MOST_SPECULATIVE_TOKENS}), prompt_lookup_max and prompt_lookup_min (default 5). "
        "Default: no drafts.",
    )
    watermark: float = 0.01
    """Share of the blocks kept free when a request is admitted, to avoid preemptions."""
    async_scheduling: bool = setting(
        False,
        "Launch a step before the results of the previous one are read. Default on GPUs: true.",
    )
    idle_poll_ms: int = 0
    """Time for which an idle step loop polls for the next request after a recent one, and around
    the moment at which KV is expected. Takes up to half a core, and saves the wake-up."""

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_optional_integer("mixed_tokens_per_decode", self.mixed_tokens_per_decode, 2)
        check_optional_integer("least_mixed_tokens", self.least_mixed_tokens, 1)
        if self.max_itl_ms is not None:
            check_positive("max_itl_ms", self.max_itl_ms)
        check_optional_integer("long_prefill_token_threshold", self.long_prefill_token_threshold, 1)
        for name in PROMPT_CUTS:
            check_optional_integer(name, getattr(self, name), 1)
        check_optional_integer("max_num_queued_reqs", self.max_num_queued_reqs, 1)
        check_optional_integer("max_num_queued_tokens", self.max_num_queued_tokens, 1)
        check_integer("replay_check_tokens", self.replay_check_tokens, 0, MOST_REPLAYED)
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", lookup_of(self.speculative_config).text)
        check_share("watermark", self.watermark)
        check_flag("async_scheduling", self.async_scheduling)
        check_integer("idle_poll_ms", self.idle_poll_ms, 0, 1000)
        check_choices(self)

    @property
    def lookup(self) -> DraftSource | None:
        """Return the parsed ``speculative_config``; None: no drafts are proposed."""
        return None if self.speculative_config is None else lookup_of(self.speculative_config)

    @property
    def num_speculative_tokens(self) -> int:
        """Return the most drafts of a row that are proposed."""
        return 0 if self.lookup is None else self.lookup.num_speculative_tokens

    @property
    def max_pending_tokens(self) -> int:
        """Return the most tokens of a sequence in the steps in flight and the next one, of which
        results may keep fewer."""
        return max(self.max_num_batched_tokens, 3 * (1 + self.num_speculative_tokens))

    @property
    def max_num_samples(self) -> int:
        """Return the most rows of logits of a step without resumed requests."""
        drafted = min(self.max_num_seqs, MOST_DRAFTED_SEQS)
        drafts = min(drafted * self.num_speculative_tokens, MOST_DRAFTS)
        return max(self.max_num_seqs, drafted + drafts)

    def mixed_tokens(self, decodes: int) -> int:
        """Return the most tokens of a step in which ``decodes`` sequences decode (at least one)."""
        budget = self.max_num_batched_tokens
        if self.mixed_tokens_per_decode is None:
            return budget
        least = self.least_mixed_tokens or 0
        return min(budget, max(least, self.mixed_tokens_per_decode * decodes))
