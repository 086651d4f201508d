"""Counters of one step and records of requests that ended, for metrics and reports."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FinishedRecord:
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
    time_to_first: float | None
    end_to_end: float


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
    planned_tokens: int = 0
    preemptions: int = 0
    late_events: int = 0
    """Events of a connector for requests that are gone."""
    refused_queue_reqs: int = 0
    refused_queue_tokens: int = 0
    first_token_times: list[float] = field(default_factory=list)
    token_gaps: Counter[float] = field(default_factory=Counter)
    """Seconds between a sequence's tokens, to how many sequences."""
    finished: list[FinishedRecord] = field(default_factory=list)
