"""Times of a worker's steps as it measured them, and what follows for a prompt there. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation
from tandem.protocol.steps import (
    DecodeBatch,
    StepTimes,
    decode_batch_seconds,
    seconds_at,
)
from tandem.router.placement.snapshot import WorkerView

Pair = tuple[Incarnation, Incarnation]

WRONG_BYTES = frozenset({FailCause.IDENTITY, FailCause.DIGEST})
TIMEOUTS = 3
"""Timeouts within ``WINDOW`` after which a link is unused for ``REST`` seconds."""
WINDOW = 60.0
REST = 30.0
MAX_QUARANTINED = 4096
"""Quarantined links that are kept; above it the oldest is dropped."""
FAULTS = 3
"""Internal errors within ``WINDOW`` that make a worker suspect for ``REST``."""


@dataclass(slots=True)
class _Record:
    failures: deque[float] = field(default_factory=lambda: deque(maxlen=TIMEOUTS))
    rests_until: float = 0.0


class LinkHealth:
    """Outcomes per pair: timeouts are forgotten with either incarnation, wrong bytes are not."""

    def __init__(self) -> None:
        self._records: dict[Pair, _Record] = {}
        self._quarantined: dict[Pair, FailCause] = {}

    def failed(self, pair: Pair, cause: FailCause, now: float) -> None:
        """Record a hand-off that ended with ``cause``. Causes that are not the link's fault are
        ignored."""
        if cause in WRONG_BYTES:
            self._quarantined[pair] = cause
            if len(self._quarantined) > MAX_QUARANTINED:
                del self._quarantined[next(iter(self._quarantined))]
        elif cause is FailCause.TIMEOUT:
            self._rest(self._records.setdefault(pair, _Record()), now)

    def slow(self, pair: Pair, now: float) -> None:
        """Record a hand-off below the rate that the link must reach."""
        self._rest(self._records.setdefault(pair, _Record()), now)

    def succeeded(self, pair: Pair) -> None:
        """Record a hand-off that succeeded: earlier timeouts no longer count."""
        self._records.pop(pair, None)

    def usable(self, pair: Pair, now: float) -> bool:
        """Return whether requests may use the link."""
        return pair not in self._quarantined and not self.rests(pair, now)

    def quarantined(self) -> dict[Pair, FailCause]:
        """Return the links that stay closed until one end is another process, lost ends
        included."""
        return dict(self._quarantined)

    def rests(self, pair: Pair, now: float) -> bool:
        """Return whether the link is unused for a while, after timeouts."""
        record = self._records.get(pair)
        return record is not None and record.rests_until > now

    def forget(self, worker: Incarnation) -> None:
        """Drop the timeouts of a worker's links after it is lost."""
        for pair in [pair for pair in self._records if worker in pair]:
            del self._records[pair]

    def _rest(self, record: _Record, now: float) -> None:
        record.failures.append(now)
        if len(record.failures) == TIMEOUTS and now - record.failures[0] <= WINDOW:
            record.rests_until = now + REST
            record.failures.clear()


class WorkerHealth:
    """Internal errors of workers that are still up."""

    def __init__(self) -> None:
        self._faults: dict[Incarnation, deque[float]] = {}

    def fault(self, worker: Incarnation, now: float) -> None:
        """Record an attempt that failed by the worker's own fault."""
        self._faults.setdefault(worker, deque(maxlen=FAULTS)).append(now)

    def suspect(self, worker: Incarnation, now: float) -> bool:
        """Return whether the worker failed so often lately that it is the last choice."""
        faults = self._faults.get(worker)
        return (
            faults is not None
            and len(faults) == FAULTS
            and faults[-1] - faults[0] <= WINDOW
            and now - faults[-1] <= REST
        )

    def forget(self, worker: Incarnation) -> None:
        """Drop a worker that is lost."""
        self._faults.pop(worker, None)


UNKNOWN_CHUNK = 512
"""Prompt tokens of a step on a worker that has not reported any."""
UNMEASURED_SHARE, MOST_UNMEASURED = 0.8, 2048
"""Share of the target of gaps that a mixed step of a worker without any is assumed to take, and its
most prompt tokens."""
UNKNOWN_PROMPT: StepTimes = ((512, 0.05),)
UNKNOWN_DECODE: StepTimes = ((1, 0.02), (64, 0.04))
"""Times that are assumed while no worker has measured any."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Times of a worker's steps; another worker's stand in for those that it has not made yet."""

    decode: StepTimes = UNKNOWN_DECODE
    prompt: StepTimes = UNKNOWN_PROMPT
    beside: StepTimes = ()
    """Seconds that prompt tokens add to a step of decodes, whose weights are read already. Without
    them, prompt tokens are assumed to take as long as alone."""
    context_s: float = 0.0
    """Seconds for each token of a decode's context."""
    steepness: float = 0.0
    """Share by which a prompt token takes longer for each token before it."""
    _known: dict[DecodeBatch, float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of ``decodes``: a forecast uses two or three decode batches, a score of times."""

    def of(self, worker: WorkerView) -> Rates:
        """Return the worker's own times, with these for what it has not measured."""
        prompt, steepness = worker.prompt_steps, worker.steepness
        if not prompt:
            prompt, steepness = self.prompt, self.steepness
        return Rates(
            worker.decode_steps or self.decode,
            prompt,
            worker.mixed_steps or self.beside,
            worker.context_s or self.context_s,
            steepness,
        )

    def decodes(self, decode_batch: DecodeBatch) -> float:
        """Return the seconds of a step of these decodes alone."""
        found = self._known.get(decode_batch)
        if found is None:
            found = self._known[decode_batch] = decode_batch_seconds(
                self.decode, self.context_s, decode_batch
            )
        return found

    def token(self, decode_batch: DecodeBatch, share: float) -> float:
        """Return the mean seconds between tokens in ``decode_batch``, on a worker that spends
        ``share`` of its time on prompts."""
        return self.decodes(decode_batch) / (1.0 - min(MOST_BUSY, share))

    def step(self, decode_batch: DecodeBatch, tokens: int, before: int = 0) -> float:
        """Return the seconds of a step with so many prompt tokens after ``before`` others. One of a
        few tokens alone takes as long as one decode."""
        weight = self._weight(tokens, before)
        if decode_batch.streams:
            return self.decodes(decode_batch) + self._beside(weight)
        return max(self.decodes(DecodeBatch(1)) if tokens else 0.0, seconds_at(self.prompt, weight))

    def compute(self, tokens: int, chunk: int, decode_batch: DecodeBatch, before: int = 0) -> float:
        """Return the seconds until so many prompt tokens are computed, ``chunk`` of them a step,
        after ``before`` that are cached."""
        return sum(
            count * self.step(decode_batch, size, at)
            for count, size, at in _cut(tokens, chunk, before)
        )

    def queue(self, worker: WorkerView, pending: int, own: int) -> float:
        """Return the seconds for ``pending`` tokens that are before a prompt of ``own`` tokens,
        whose first step it shares."""
        mean = worker.mean_waiting or pending
        ahead = self._prompts(worker, pending + own, mean) - self._prompts(worker, own, mean)
        return max(0.0, ahead)

    def added(self, tokens: int, chunk: int, before: int = 0) -> float:
        """Return the seconds by which steps of decodes are longer, together, while a prompt of so
        many tokens is computed next to them."""
        return sum(
            count * self._beside(self._weight(size, at))
            for count, size, at in _cut(tokens, chunk, before)
        )

    def mixed_chunk(self, worker: WorkerView, before: int = 0) -> int:
        """Return the prompt tokens, after ``before`` others, of the worker's next step with
        decodes. A worker that bounds the time of its steps cuts chunks shorter after longer
        contexts."""
        chunk = worker.mixed_chunk_tokens or chunk_of(worker)
        return max(1, int(chunk / (1 + self.steepness * before))) if worker.bounds_steps else chunk

    def _prompts(self, worker: WorkerView, tokens: int, mean: float) -> float:
        """Return the seconds for prompts of ``mean`` tokens, one after the other: what one of them
        attends to does not grow with the queue."""
        full, rest = divmod(tokens, chunk := chunk_of(worker))
        return sum(
            count * self.step(worker.decode_batch, size, round((mean - size) / 2))
            for count, size in ((full, chunk), (1, rest))
            if count and size
        )

    def _beside(self, tokens: int) -> float:
        return seconds_at(self.beside or self.prompt, tokens)

    def _weight(self, tokens: int, before: int) -> int:
        """Return the tokens of a prompt's start that take as long as these."""
        return round(tokens * (1 + self.steepness * (before + tokens / 2)))


MOST_BUSY = 0.9
"""Largest share of a worker's time that prompts are assumed to take: beyond it, times are those of
an overload that lasts, not of the rates."""


def measured(workers: Sequence[WorkerView]) -> Rates | None:
    """Return the times of a fleet, each kind of the first worker that measured it; None before a
    worker has computed a prompt."""
    prompt: StepTimes = ()
    decode: StepTimes = ()
    beside: StepTimes = ()
    steepness = context_s = 0.0
    for each in workers:
        if each.prompt_steps and not prompt:
            prompt, steepness = each.prompt_steps, each.steepness
        decode = decode or each.decode_steps
        beside = beside or each.mixed_steps
        context_s = context_s or each.context_s
    if not prompt:
        return None
    return Rates(decode or UNKNOWN_DECODE, prompt, beside, context_s, steepness)


def with_mixed_chunk(worker: WorkerView, rates: Rates, itl: float) -> WorkerView:
    """Return the worker with the chunks that it will have after its first mixed steps.

    A worker that bounds the time of its steps reports the least chunk until it has measured one, so
    it would never be sent a prompt. Its steps are assumed to fill a share of ``itl``, the target of
    gaps in seconds, by the times of other workers.
    """
    if not worker.bounds_steps or worker.mixed_steps:
        return worker
    decodes = max(worker.decode_batch, DecodeBatch(1))
    low, high = max(1, worker.mixed_chunk_tokens), MOST_UNMEASURED
    while low < high:
        middle = (low + high + 1) // 2
        if rates.step(decodes, middle) <= UNMEASURED_SHARE * itl:
            low = middle
        else:
            high = middle - 1
    chunk = low if worker.decode_batch.streams else worker.chunk_tokens
    return replace(worker, chunk_tokens=chunk, mixed_chunk_tokens=low)


def chunk_of(worker: WorkerView) -> int:
    """Return the prompt tokens of the worker's next step."""
    return worker.chunk_tokens or UNKNOWN_CHUNK


def _cut(tokens: int, chunk: int, before: int) -> Iterator[tuple[int, int, int]]:
    """Yield a prompt's chunks: their number, size, and mean tokens before them."""
    full, rest = divmod(tokens, max(1, chunk))
    if full:
        yield full, chunk, before + (full - 1) * chunk // 2
    if rest:
        yield 1, rest, before + full * chunk
