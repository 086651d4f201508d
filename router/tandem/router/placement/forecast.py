"""What each way would come to for one prompt, in seconds, from rates that were measured. Pure.

Three ways: a prefill worker hands over to a decode worker (``pair``), a decode worker computes the
prompt beside what it decodes (``decode``), a prefill worker goes on with what it computed
(``prefill``). Each has a time to the first token, one more to the second, and what the others who
run there lose. One cost in seconds puts them together. No length of a prompt is treated by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.ids import Incarnation
from tandem.protocol.steps import StepTimes, decode_seconds, seconds_at
from tandem.router.placement.load import is_full, uncached
from tandem.router.placement.snapshot import LinkPace, PromptFacts, WorkerView

UNKNOWN_TAIL = 0.02
"""Seconds between the first token and the second over a link that has not been used."""
UNKNOWN_RESIDENCE = 1.0
"""Seconds that a request is taken to hold its blocks before one has ended."""
COMING_STREAMS = 1
"""Streams that a decode worker's time is kept for, beside those it has: they come in a moment, and
what they lose counts in full."""
LATE = 3.0
"""Each second over a bound weighs so much more."""
SUSPECT = 1e6
"""Seconds that a worker which fails by its own fault costs."""
PREEMPTING = 1e3
"""Seconds for computing a prompt on a decode worker that is about to preempt others for it."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What clients are to see: the model's weights bend at these seconds."""

    ttft: float
    itl: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """One way, and what it would come to; all in seconds."""

    way: str
    """pair, decode or prefill: who computes, and who goes on."""
    worker: Incarnation
    prefill: Incarnation | None
    ttft: float
    """To the first token."""
    second: float
    """From the first token to the second."""
    damage: float
    """What all streams there lose together."""
    cost: float

    def __str__(self) -> str:
        names = [each.hex()[:8] for each in (self.prefill, self.worker) if each is not None]
        return (
            f"{self.way} {'>'.join(names)}: first token {self.ttft * 1e3:.0f} ms, "
            f"second {self.second * 1e3:.0f} ms later, others lose {self.damage * 1e3:.0f} ms, "
            f"cost {self.cost * 1e3:.0f} ms"
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Times of a worker's steps; another's stand in for those that it has not made yet."""

    decode: StepTimes
    prompt: StepTimes

    @classmethod
    def of(cls, worker: WorkerView, others: tuple[WorkerView, ...]) -> Rates | None:
        """None while nobody has computed a prompt."""
        decode = next((e.decode_steps for e in (worker, *others) if e.decode_steps), ())
        prompt = next((e.prompt_steps for e in (worker, *others) if e.prompt_steps), ())
        return cls(decode, prompt) if prompt else None

    def step(self, decodes: int, tokens: int) -> float:
        """Seconds of a step; one of a few prompt tokens alone takes what one decode does."""
        if decodes:
            return decode_seconds(self.decode, decodes) + seconds_at(self.prompt, tokens)
        floor = decode_seconds(self.decode, 1) if tokens else 0.0
        return max(floor, seconds_at(self.prompt, tokens))

    def compute(self, tokens: int, chunk: int, decodes: int) -> float:
        """Seconds until so many prompt tokens are computed, ``chunk`` of them in a step."""
        full, rest = divmod(tokens, max(1, chunk))
        seconds = full * self.step(decodes, chunk) if full else 0.0
        return seconds + (self.step(decodes, rest) if rest else 0.0)


def forecast_pair(
    prompt: PromptFacts,
    producer: WorkerView,
    consumer: WorkerView,
    pace: LinkPace,
    rates: tuple[Rates, Rates],
    targets: Targets,
) -> Forecast:
    """Prefill there, hand over, decode here."""
    fast, slow = rates
    own = uncached(prompt, producer)
    ahead = producer.pending_tokens
    ttft = fast.compute(ahead + own, _chunk(producer), producer.num_decoding)
    streams = consumer.num_requests + 1
    second = pace.tail_s if pace.tail_s is not None else UNKNOWN_TAIL
    second += pace.wait + decode_seconds(slow.decode, streams) + wait_for_room(prompt, consumer)
    lost = producer.num_decoding * seconds_at(fast.prompt, own)
    cost = _late(ttft, targets.ttft) + second
    cost += lost * _weight(fast.step(producer.num_decoding, 0), targets)
    cost += _joining(slow, consumer, targets) + _fault(producer) + _fault(consumer)
    return Forecast("pair", consumer.incarnation, producer.incarnation, ttft, second, lost, cost)


def forecast_whole(
    prompt: PromptFacts, worker: WorkerView, rates: Rates, targets: Targets, *, way: str
) -> Forecast:
    """All of it on one worker, its prompt in chunks beside what it decodes."""
    own, decodes = uncached(prompt, worker), worker.num_decoding
    ahead = worker.compute_tokens
    streams = worker.num_requests if way == "decode" else decodes
    alone = seconds_at(rates.prompt, min(own, _chunk(worker)))
    alone *= max(1.0, own / _chunk(worker))
    room = wait_for_room(prompt, worker)
    ttft = rates.compute(ahead + own, _chunk(worker), decodes) + room
    second = decode_seconds(rates.decode, streams + 1)
    lost = alone * streams
    busy = rates.step(max(1, streams), 0)
    cost = _late(ttft, targets.ttft) + second + lost * _weight(busy, targets)
    cost += _joining(rates, worker, targets) + _fault(worker)
    if way == "prefill":
        slowed = _slowed(rates, worker, targets)
        lost += slowed
        cost += slowed
    else:
        cost += alone * COMING_STREAMS + (PREEMPTING if is_full(worker) else 0.0)
    return Forecast(way, worker.incarnation, None, ttft, second, lost, cost)


def wait_for_room(prompt: PromptFacts, worker: WorkerView) -> float:
    """Seconds until blocks and a seat are free: they come back as requests end."""
    if not worker.total_blocks:
        return 0.0
    blocks = -(-(uncached(prompt, worker) + worker.pending_tokens) // worker.block_size) + 1
    used = max(1, worker.total_blocks - worker.free_blocks)
    lacking = max(0, blocks - worker.free_blocks) / used
    seats = max(0, worker.num_requests + 1 - worker.max_num_seqs) / max(1, worker.num_requests)
    residence = worker.residence_s or UNKNOWN_RESIDENCE
    return max(lacking, seats) * residence


def can_hold(prompt: PromptFacts, worker: WorkerView) -> bool:
    """Whether the prompt and a token would fit if nothing else were there."""
    if not worker.total_blocks:
        return True
    return prompt.num_tokens < worker.total_blocks * worker.block_size


def _chunk(worker: WorkerView) -> int:
    return worker.chunk_tokens or 512


def _late(seconds: float, target: float) -> float:
    """Seconds as a client feels them: those over the bound weigh more."""
    return seconds + LATE * max(0.0, seconds - target)


def _weight(step: float, targets: Targets) -> float:
    """What a stream's lost second counts: little while its gaps are far below the bound."""
    return (step / targets.itl) ** 2


def _joining(rates: Rates, worker: WorkerView, targets: Targets) -> float:
    """What one more sequence costs those that decode there, over the time it stays."""
    streams = worker.num_requests
    now, then = (decode_seconds(rates.decode, each) for each in (streams, streams + 1))
    if not now:
        return 0.0
    stays = worker.residence_s or UNKNOWN_RESIDENCE
    return streams * (then / now - 1) * stays * _weight(then, targets)


def _slowed(rates: Rates, worker: WorkerView, targets: Targets) -> float:
    """What prompts of a prefill worker wait longer while it decodes one sequence more: the share
    of its time that steps take for decodes, over the stay, for those that wait there at a time."""
    before, after = (decode_seconds(rates.decode, worker.num_decoding + more) for more in (0, 1))
    share = min(1.0, (after - before) / targets.itl)
    waiting = worker.pending_tokens / max(1, _chunk(worker))
    stays = worker.residence_s or UNKNOWN_RESIDENCE
    return share * stays * max(1.0, waiting)


def _fault(worker: WorkerView) -> float:
    return SUSPECT if worker.suspect else 0.0
