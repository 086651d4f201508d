"""Measured times of a worker's steps, and the resulting times of a prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import DecodeBatch, StepTimes, decode_batch_seconds, seconds_at
from tandem.router.placement.snapshot import WorkerView

Pair = tuple[Incarnation, Incarnation]

WRONG_BYTES = frozenset({FailCause.IDENTITY, FailCause.DIGEST})
TIMEOUTS = 3
"""Timeouts within ``WINDOW`` after which a link is unused for ``REST`` seconds."""
WINDOW = 60.0
REST = 30.0
MAX_QUARANTINED = 4096
"""Maximum quarantined links; beyond it the oldest is dropped."""
FAULTS = 3
"""Internal errors within ``WINDOW`` that make a worker suspect for ``REST``."""


@dataclass(slots=True)
class _Record:
    failures: deque[float] = field(default_factory=lambda: deque(maxlen=TIMEOUTS))
    rests_until: float = 0.0


class LinkHealth:
    """Outcomes per pair. Timeouts are dropped with either incarnation, wrong bytes are not."""

    def __init__(self) -> None:
        self._records: dict[Pair, _Record] = {}
        self._quarantined: dict[Pair, FailCause] = {}

    def failed(self, pair: Pair, cause: FailCause, now: float) -> None:
        """Record a failed hand-off. Causes outside the link are ignored."""
        if cause in WRONG_BYTES:
            self._quarantined[pair] = cause
            if len(self._quarantined) > MAX_QUARANTINED:
                del self._quarantined[next(iter(self._quarantined))]
        elif cause is FailCause.TIMEOUT:
            self._rest(self._records.setdefault(pair, _Record()), now)

    def slow(self, pair: Pair, now: float) -> None:
        """Record a hand-off below the required rate."""
        self._rest(self._records.setdefault(pair, _Record()), now)

    def succeeded(self, pair: Pair) -> None:
        """Record a success: earlier timeouts no longer count."""
        self._records.pop(pair, None)

    def usable(self, pair: Pair, now: float) -> bool:
        return pair not in self._quarantined and not self.rests(pair, now)

    def quarantined(self) -> dict[Pair, FailCause]:
        """Return links that are closed until one end is another process."""
        return dict(self._quarantined)

    def rests(self, pair: Pair, now: float) -> bool:
        """Return whether the link is unused for a while."""
        record = self._records.get(pair)
        return record is not None and record.rests_until > now

    def forget(self, worker: Incarnation) -> None:
        for pair in [pair for pair in self._records if worker in pair]:
            del self._records[pair]

    def _rest(self, record: _Record, now: float) -> None:
        record.failures.append(now)
        if len(record.failures) == TIMEOUTS and now - record.failures[0] <= WINDOW:
            record.rests_until = now + REST
            record.failures.clear()


class WorkerHealth:
    """Internal errors of workers that are up."""

    def __init__(self) -> None:
        self._faults: dict[Incarnation, deque[float]] = {}

    def fault(self, worker: Incarnation, now: float) -> None:
        self._faults.setdefault(worker, deque(maxlen=FAULTS)).append(now)

    def suspect(self, worker: Incarnation, now: float) -> bool:
        """Return whether the worker failed so often that it is the last choice."""
        faults = self._faults.get(worker)
        return (
            faults is not None
            and len(faults) == FAULTS
            and faults[-1] - faults[0] <= WINDOW
            and now - faults[-1] <= REST
        )

    def forget(self, worker: Incarnation) -> None:
        self._faults.pop(worker, None)


UNKNOWN_CHUNK = 512
"""Assumed prompt tokens of a step."""
UNMEASURED_SHARE, MOST_UNMEASURED = 0.8, 2048
"""Assumed share of the target that a mixed step takes, and its maximum prompt tokens."""
UNKNOWN_PROMPT: StepTimes = ((512, 0.05),)
UNKNOWN_DECODE: StepTimes = ((1, 0.02), (64, 0.04))
"""Assumed times before any measurement."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Times of a worker's steps, with another worker's for missing ones."""

    decode: StepTimes = UNKNOWN_DECODE
    prompt: StepTimes = UNKNOWN_PROMPT
    beside: StepTimes = ()
    """Seconds that prompt tokens add to a step with decodes; empty: as in a step of their own."""
    context_s: float = 0.0
    """Seconds per token of a decode's context."""
    steepness: float = 0.0
    """Relative increase of a prompt token's time per token before it."""
    _known: dict[DecodeBatch, float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of ``decodes``."""

    def of(self, worker: WorkerView) -> Rates:
        """Return the worker's own times, with these for missing ones."""
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
        """Return the seconds of a step with only these decodes."""
        found = self._known.get(decode_batch)
        if found is None:
            found = self._known[decode_batch] = decode_batch_seconds(
                self.decode, self.context_s, decode_batch
            )
        return found

    def token(self, decode_batch: DecodeBatch, share: float) -> float:
        """Return the mean seconds between tokens if prompts take ``share`` of the time."""
        return self.decodes(decode_batch) / (1.0 - min(MOST_BUSY, share))

    def step(self, decode_batch: DecodeBatch, tokens: int, before: int = 0) -> float:
        """Return the seconds of a step with prompt tokens after ``before`` earlier ones.

        A few tokens take as long as one decode.
        """
        weight = self._weight(tokens, before)
        if decode_batch.streams:
            return self.decodes(decode_batch) + self._beside(weight)
        return max(self.decodes(DecodeBatch(1)) if tokens else 0.0, seconds_at(self.prompt, weight))

    def compute(self, tokens: int, chunk: int, decode_batch: DecodeBatch, before: int = 0) -> float:
        """Return the seconds to compute prompt tokens in steps of ``chunk``.

        ``before`` tokens of the prompt are cached.
        """
        return sum(
            count * self.step(decode_batch, size, at)
            for count, size, at in _cut(tokens, chunk, before)
        )

    def queue(self, worker: WorkerView, pending: int, own: int) -> float:
        """Return the seconds for ``pending`` tokens before a prompt of ``own`` tokens."""
        mean = worker.mean_waiting or pending
        ahead = self._prompts(worker, pending + own, mean) - self._prompts(worker, own, mean)
        return max(0.0, ahead)

    def added(self, tokens: int, chunk: int, before: int = 0) -> float:
        """Return the total seconds by which a prompt lengthens steps of decodes."""
        return sum(
            count * self._beside(self._weight(size, at))
            for count, size, at in _cut(tokens, chunk, before)
        )

    def mixed_chunk(self, worker: WorkerView, before: int = 0) -> int:
        """Return the prompt tokens of the next step with decodes, after ``before`` others."""
        chunk = worker.mixed_chunk_tokens or chunk_of(worker)
        return max(1, int(chunk / (1 + self.steepness * before))) if worker.bounds_steps else chunk

    def _prompts(self, worker: WorkerView, tokens: int, mean: float) -> float:
        """Return the seconds for prompts of ``mean`` tokens, one after the other."""
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
"""Maximum assumed share of prompts in a worker's time; more is a lasting overload."""


def measured(workers: Sequence[WorkerView]) -> Rates | None:
    """Return the times of a fleet, each of the first worker that measured it.

    None before a worker has computed a prompt.
    """
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

    Before, it reports the minimum and would get no prompt. Its steps are assumed to fill a share of
    ``itl`` seconds.
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
