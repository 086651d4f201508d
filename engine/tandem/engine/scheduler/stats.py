"""Counters of one step and records of ended requests, for metrics and reports."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from tandem.engine.request import Request, RequestGroup
from tandem.protocol.timeline import Note, NoteBook


def note_chunk(request: Request, start: int, end: int, now: float) -> None:
    """Note a step over prompt tokens [start, end) that ended at ``now``. It began at the end of the
    step before, or when the request was planned."""
    group = request.group
    book = group.notes
    if book is None:
        return
    began = group.scheduled if group.scheduled is not None else now
    for each in reversed(book.notes):
        if each.name in ("chunk", "load"):
            began = max(began, each.end)
            break
    book.add("chunk", min(began, now), now, end - start)


def note_preemption(request: Request, now: float) -> None:
    """Note a preemption."""
    if request.group.notes is not None:
        request.group.notes.add("preempted", now, now, 1)


def closed(group: RequestGroup, why: str, now: float) -> NoteBook:
    """Return all notes of a request that ended at ``now``."""
    book = group.notes
    assert book is not None, "only watched requests have notes"
    scheduled, first = group.scheduled, group.first_token
    book.why = why
    # Beyond the bound on notes: the span's ends are required.
    begun = now if scheduled is None else scheduled
    book.notes.append(Note("queue", group.arrival, begun))
    if first is not None:
        book.notes.append(Note("decode", first, now, group.num_generated))
    return book


SHARE_SECONDS = 2.0
"""Seconds after which a step's weight in a share of time has fallen to 1/e."""
RATE_STEPS = 32
"""Number of last steps that count for the rate of prefill."""


class FinishedRecord(msgspec.Struct, frozen=True, gc=False):
    """Record of an ended request (all choices); seconds, None for phases not reached."""

    reason: str
    """stop, length, abort, error, or handed_over by a producer."""
    num_prompt: int
    num_generated: int
    max_tokens: int | None
    n: int
    num_preemptions: int
    num_computed_prompt: int
    """Prompt tokens computed here: not cached, not loaded."""
    queue: float | None
    prefill: float | None
    decode: float | None
    end_to_end: float


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State of a scheduler: sequences by state, and blocks."""

    running: int
    waiting: int
    parked: int
    """Requests without blocks whose KV is to come, or may not be computed yet."""
    loading: int
    gated: int
    held_requests: int
    """Ended requests whose blocks the connector keeps."""
    held_blocks: int
    free_blocks: int
    cache_usage: float

    @property
    def deferred(self) -> int:
        """Return the requests that wait for KV or a grammar, not for room."""
        return self.parked + self.loading + self.gated


@dataclass(slots=True)
class StepStats:
    """Counts since the last ``take_stats``."""

    prompt_tokens: int = 0
    """Prompt tokens of requests whose prefill was planned to begin, or whose KV was loaded."""
    computed_tokens: int = 0
    hit_tokens: int = 0
    external_tokens: int = 0
    queried_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    """Tokens sampled a step late, for sequences that had ended."""
    replayed_tokens: int = 0
    """Emitted tokens that a resume sampled again to compare."""
    agreed_tokens: int = 0
    """Replayed tokens that were sampled equal to the emitted ones."""
    draft_tokens: int = 0
    """Proposed tokens that a step checked."""
    accepted_tokens: int = 0
    """Proposed tokens that were sampled equal."""
    planned_tokens: int = 0
    flops: float = 0.0
    """Floating point operations that the steps require on one device, as for the bytes."""
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    preemptions: int = 0
    late_events: int = 0
    """Connector events for requests that have ended."""
    refused_queue_reqs: int = 0
    refused_queue_tokens: int = 0
    first_token_times: list[float] = field(default_factory=list)
    token_gaps: Counter[float] = field(default_factory=Counter)
    """Seconds between a sequence's tokens, with the number of sequences."""
    finished: list[FinishedRecord] = field(default_factory=list)

    def add_cost(self, flops: float, read_bytes: float, write_bytes: float) -> None:
        self.flops += flops
        self.read_bytes += read_bytes
        self.write_bytes += write_bytes


class PrefillRate:
    """Prompt tokens per second, for placement: the median over the tokens of the last steps.

    Neither small steps nor one that built kernels predict a long prompt.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)

    @property
    def tokens_per_s(self) -> float:
        """Return the rate; 0 before the first step."""
        half = sum(tokens for _, tokens in self._steps) / 2
        for rate, tokens in sorted(self._steps, reverse=True):
            half -= tokens
            if half <= 0:
                return rate
        return 0.0

    def note(self, tokens: int, seconds: float) -> None:
        self._steps.append((tokens / seconds, tokens))


class PromptLoad:
    """Share of time that prompts take, and prompts computed a second, with exponential decay, for
    placement."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0.0
        self._at = 0.0

    def note(self, seconds: float, prompts: int, now: float) -> None:
        """Record a step's ``seconds`` for prompts and the number of prompts that it completed."""
        self._fade(now)
        self._seconds += max(0.0, seconds)
        self._count += prompts

    def report(self, now: float) -> tuple[float, float]:
        """Return the share of the time, 0 to 1, and prompts per second."""
        self._fade(now)
        return min(1.0, self._seconds / SHARE_SECONDS), self._count / SHARE_SECONDS

    def _fade(self, now: float) -> None:
        kept = math.exp((self._at - now) / SHARE_SECONDS) if now > self._at else 1.0
        self._seconds *= kept
        self._count *= kept
        self._at = max(self._at, now)
