"""Times of a worker's steps as it measured them, and what follows for a prompt there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tandem.protocol.steps import Crowd, StepTimes, crowd_seconds, decode_seconds, seconds_at
from tandem.router.placement.snapshot import WorkerView

UNTAUGHT_SHARE, MOST_UNTAUGHT = 0.8, 2048
"""Of the bound of gaps, what a step with prompts is taken to last on a worker that has made none,
and their tokens at most."""
UNKNOWN_CHUNK = 512
"""Prompt tokens of a step that a worker is taken to make before it has said."""


@dataclass(frozen=True, slots=True)
class StandIns:
    """What a fleet measured, of each kind by the first that did: for workers that have not."""

    prompt: StepTimes
    steepness: float
    """Of who measured ``prompt``."""
    beside: StepTimes
    context_s: float
    decode: tuple[StepTimes, ...]
    """Of those that had more decodes in a step than all before them."""

    @classmethod
    def of(cls, workers: Sequence[WorkerView]) -> StandIns:
        """Once for all of a fleet."""
        prompt = next(
            ((each.prompt_steps, each.steepness) for each in workers if each.prompt_steps),
            ((), 0.0),
        )
        beside = next((each.beside_steps for each in workers if each.beside_steps), ())
        context_s = next((each.context_s for each in workers if each.context_s), 0.0)
        decode: list[StepTimes] = []
        for each in workers:
            steps = each.decode_steps
            if steps and (not decode or steps[-1][0] > decode[-1][-1][0]):
                decode.append(steps)
        return cls(*prompt, beside, context_s, tuple(decode))

    def decoding(self, worker: WorkerView) -> StepTimes:
        """Its own steps, or of the first that made any; beyond the most decodes that it had in a
        step they rise as those do of who had more. A prefill worker has seen a few at once, and
        would else be taken to decode any number in the time of those."""
        own = worker.decode_steps
        for other in self.decode:
            if not own:
                own = other
                continue
            most, seconds = own[-1]
            if other[-1][0] <= most:
                continue
            start = decode_seconds(other, most)
            more = ((n, seconds + max(0.0, s - start)) for n, s in other if n > most)
            own = (*own, *more)
        return own


@dataclass(frozen=True, slots=True)
class Rates:
    """Times of a worker's steps; another's stand in for those that it has not made yet."""

    decode: StepTimes
    prompt: StepTimes
    beside: StepTimes = ()
    """What prompt tokens add to a step of decodes, whose weights are read already; where nobody
    made such a step, they are taken to need what they do alone."""
    context_s: float = 0.0
    """Seconds for each token of a decode's context."""
    steepness: float = 0.0
    """By what share a prompt's token takes longer for each token before it."""
    _known: dict[Crowd, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of decodes asked for before: a forecast asks for two or three crowds, a score of times."""

    @classmethod
    def of(cls, worker: WorkerView, others: StandIns) -> Rates | None:
        """None while nobody has computed a prompt."""
        prompt, steepness = worker.prompt_steps, worker.steepness
        if not prompt:
            prompt, steepness = others.prompt, others.steepness
        if not prompt:
            return None
        beside = worker.beside_steps or others.beside
        context_s = worker.context_s or others.context_s
        return cls(others.decoding(worker), prompt, beside, context_s, steepness)

    def decodes(self, crowd: Crowd) -> float:
        """Seconds of a step of these decodes alone; 0 while unknown."""
        found = self._known.get(crowd)
        if found is None:
            found = self._known[crowd] = crowd_seconds(self.decode, self.context_s, crowd)
        return found

    def step(self, crowd: Crowd, tokens: int, before: int = 0) -> float:
        """Seconds of a step with so many prompt tokens, behind ``before`` others; one of a few
        alone takes what one decode does."""
        weight = self._weight(tokens, before)
        if crowd.streams:
            return self.decodes(crowd) + self._beside(weight)
        return max(self.decodes(Crowd(1)) if tokens else 0.0, seconds_at(self.prompt, weight))

    def compute(self, tokens: int, chunk: int, crowd: Crowd, before: int = 0) -> float:
        """Seconds until so many prompt tokens are computed, ``chunk`` of them in a step, behind
        ``before`` that are cached."""
        return sum(
            count * self.step(crowd, size, at) for count, size, at in _cut(tokens, chunk, before)
        )

    def queue(self, tokens: int, chunk: int, crowd: Crowd, mean: float) -> float:
        """Seconds until so many tokens of prompts of ``mean`` tokens are computed, one prompt
        behind the other: each begins anew, so what one looks back at does not grow with the
        queue."""
        full, rest = divmod(tokens, max(1, chunk))
        return sum(
            count * self.step(crowd, size, round((mean - size) / 2))
            for count, size in ((full, chunk), (1, rest))
            if count and size
        )

    def added(self, tokens: int, chunk: int, before: int = 0) -> float:
        """Seconds by which steps of decodes are longer, together, while a prompt of so many tokens
        is computed beside them."""
        return sum(
            count * self._beside(self._weight(size, at))
            for count, size, at in _cut(tokens, chunk, before)
        )

    def narrowed(self, chunk: int, before: int) -> int:
        """A chunk behind ``before`` tokens that takes what one of ``chunk`` does at a prompt's
        start."""
        return max(1, int(chunk / (1 + self.steepness * before)))

    def _beside(self, tokens: int) -> float:
        return seconds_at(self.beside or self.prompt, tokens)

    def _weight(self, tokens: int, before: int) -> int:
        """Tokens of a prompt's start that take what these do."""
        return round(tokens * (1 + self.steepness * (before + tokens / 2)))


def _cut(tokens: int, chunk: int, before: int) -> Iterator[tuple[int, int, int]]:
    """A prompt in chunks: how many of which size, and behind how many tokens in the mean."""
    full, rest = divmod(tokens, max(1, chunk))
    if full:
        yield full, chunk, before + (full - 1) * chunk // 2
    if rest:
        yield 1, rest, before + full * chunk


def as_taught(worker: WorkerView, rates: Rates, itl: float) -> WorkerView:
    """The worker as it will be once it has computed prompts beside decodes, if it has not. One that
    bounds the time of its steps takes the least chunk until then, by which nobody would ever send
    it a prompt: it is taken to fill steps up to a share of ``itl``, the bound of gaps in seconds,
    by what steps took elsewhere."""
    if not worker.bounds_steps or worker.beside_steps:
        return worker
    some = max(worker.crowd, Crowd(1))
    low, high = max(1, worker.mixed_chunk_tokens), MOST_UNTAUGHT
    while low < high:
        middle = (low + high + 1) // 2
        if rates.step(some, middle) <= UNTAUGHT_SHARE * itl:
            low = middle
        else:
            high = middle - 1
    now = low if worker.crowd.streams else worker.chunk_tokens
    return replace(worker, chunk_tokens=now, mixed_chunk_tokens=low)


def chunk_of(worker: WorkerView) -> int:
    """Prompt tokens of its next step."""
    return worker.chunk_tokens or UNKNOWN_CHUNK


def mixed_chunk_of(worker: WorkerView, rates: Rates, before: int = 0) -> int:
    """Prompt tokens, behind ``before`` others, of its next step beside decodes. A worker that
    bounds the time of its steps cuts chunks shorter the more lies before them."""
    chunk = worker.mixed_chunk_tokens or chunk_of(worker)
    if not worker.bounds_steps:
        return chunk
    return rates.narrowed(chunk, before)
