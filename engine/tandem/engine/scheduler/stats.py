"""Counters of one step and records of requests that ended, for metrics and reports."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

SHARE_SECONDS = 2.0
"""Seconds after which a step's part in a share of time has fallen to 1/e."""
RATE_STEPS = 32
"""How many of the last steps count for the rate of prefill."""


class FinishedRecord(msgspec.Struct, frozen=True, gc=False):
    """One request (all its choices) that ended; times in seconds, None where it never got there."""

    reason: str
    """stop, length, abort, error, or handed_over by a producer."""
    num_prompt: int
    num_generated: int
    max_tokens: int | None
    n: int
    num_preemptions: int
    num_computed_prompt: int
    """Prompt tokens computed here: not cached, not brought."""
    queue: float | None
    prefill: float | None
    decode: float | None
    end_to_end: float


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What lives in a scheduler at one moment: sequences by what they do, and blocks."""

    running: int
    waiting: int
    """In the queue: new or preempted."""
    parked: int
    """Requests whose KV is to come, or may not be computed yet, without a block."""
    loading: int
    """Requests whose KV is coming into their blocks."""
    gated: int
    """What waits at its gates, as for a grammar to be compiled."""
    held_requests: int
    """Gone, but for blocks that the connector keeps."""
    held_blocks: int
    free_blocks: int
    cache_usage: float
    """Share of the blocks that somebody holds, 0 to 1."""

    @property
    def deferred(self) -> int:
        """What waits, and not for room: for KV or a grammar."""
        return self.parked + self.loading + self.gated


@dataclass(slots=True)
class StepStats:
    """What happened since the last ``take``."""

    prompt_tokens: int = 0
    """Prompt tokens of requests whose prefill was planned to begin, or whose KV was brought."""
    computed_tokens: int = 0
    """Prompt tokens planned to be computed here."""
    hit_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    external_tokens: int = 0
    """Prompt tokens whose KV came from elsewhere."""
    queried_tokens: int = 0
    """Tokens looked for in the prefix cache."""
    generated_tokens: int = 0
    discarded_tokens: int = 0
    """Drawn a step late, for sequences that had ended."""
    replayed_tokens: int = 0
    """Emitted tokens that a resume drew again to compare."""
    agreed_tokens: int = 0
    """Of the replayed tokens, those that were drawn as they stand."""
    planned_tokens: int = 0
    flops: float = 0.0
    """Operations that the steps' arithmetic needs, on one device; bytes likewise."""
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    preemptions: int = 0
    late_events: int = 0
    """Events of a connector for requests that are gone."""
    refused_queue_reqs: int = 0
    refused_queue_tokens: int = 0
    first_token_times: list[float] = field(default_factory=list)
    token_gaps: Counter[float] = field(default_factory=Counter)
    """Seconds between a sequence's tokens, to how many sequences."""
    finished: list[FinishedRecord] = field(default_factory=list)

    def add_cost(self, flops: float, read_bytes: float, write_bytes: float) -> None:
        """What one more step asked of its device."""
        self.flops += flops
        self.read_bytes += read_bytes
        self.write_bytes += write_bytes


class PrefillRate:
    """Prompt tokens a second, as placement wants to know it: the rate at which half of those of the
    last steps were computed, or faster.

    A median over tokens: a step of few tokens, which takes nearly as long as one of a thousand,
    says little about what a long prompt would take, and a step that had to build its kernels says
    nothing.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        half = sum(tokens for _, tokens in self._steps) / 2
        for rate, tokens in sorted(self._steps, reverse=True):
            half -= tokens
            if half <= 0:
                return rate
        return 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """One step of ``tokens`` prompt tokens took ``seconds``, above 0."""
        self._steps.append((tokens / seconds, tokens))


class PromptLoad:
    """What prompts take of an engine's time, and how many are computed: both over the last seconds,
    what is older fading. Placement forecasts from it what those who come would wait."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0.0
        self._at = 0.0

    def note(self, seconds: float, prompts: int, now: float) -> None:
        """A step gave prompts so many seconds, and computed the last token of so many."""
        self._fade(now)
        self._seconds += max(0.0, seconds)
        self._count += prompts

    def report(self, now: float) -> tuple[float, float]:
        """The share of the time, 0 to 1, and prompts a second."""
        self._fade(now)
        return min(1.0, self._seconds / SHARE_SECONDS), self._count / SHARE_SECONDS

    def _fade(self, now: float) -> None:
        kept = math.exp((self._at - now) / SHARE_SECONDS) if now > self._at else 1.0
        self._seconds *= kept
        self._count *= kept
        self._at = max(self._at, now)
