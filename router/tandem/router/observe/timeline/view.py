"""A record as JSON: complete for operators, short for the client of the call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import msgspec

from tandem.protocol.card import WorkerRole
from tandem.protocol.timeline import Note
from tandem.router.dispatch.job import Scene
from tandem.router.placement.snapshot import LinkThroughput, PromptFacts, WorkerView
from tandem.tracing.recording import AttemptRecord, LegRecord, Recording

BACK_SECONDS = 0.0005
"""Assumed transport time of a worker's last message, at most."""
TAKEN_LATE_SECONDS = 0.05
"""Transport time above which the delay is the worker's."""

DEFAULT, HELD, DECODE, WAY, QUEUE, LOAD, CHUNK, STOPPED, OWN = range(9)
"""Ranks of stretches; the most specific is the highest."""
_OF_NOTES = {
    "queue": (QUEUE, "queue"),
    "chunk": (CHUNK, "chunk"),
    "reserve": (QUEUE, "waits for blocks"),
    "load": (LOAD, "load KV"),
    "commit": (LOAD, "commit KV"),
    "stopped": (STOPPED, "stood still"),
    "decode": (DECODE, "decode"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a call that belongs to one party."""

    owner: str
    """router, client, or a worker's role."""
    name: str
    begin: float
    """Seconds on the router's clock."""
    seconds: float
    worker: str = ""
    amount: int = 0


@dataclass(frozen=True, slots=True)
class _Cover:
    rank: int
    begin: float
    end: float
    owner: str
    name: str
    worker: str = ""
    amount: int = 0


def placed(leg: LegRecord) -> tuple[float, float] | None:
    """Return the arrival of the attempt at the worker, on the router's clock, and its possible
    error.

    None while the worker has reported nothing.
    """
    times, received_at = leg.times, leg.received_at
    if times is None or received_at is None:
        return None
    ways = max(0.0, received_at - leg.sent - times.sent)
    back = min(ways / 2, BACK_SECONDS)
    came = received_at - back - times.sent
    if leg.accepted is not None:
        came = min(came, max(leg.sent, leg.accepted))
    return max(leg.sent, came), ways


def parts_of(recording: Recording, now: float) -> list[Part]:
    """Return all parts in order, from the call's arrival to its end or ``now``.

    Those spread over the stream of tokens come last.
    """
    begin = recording.arrived
    end = recording.ended if recording.ended is not None else now
    covers = _Sweep(_covers(recording, end))
    first = recording.first_output
    streamed = first if first is not None and first < end else end
    cuts = {begin, end, streamed}
    cuts.update(at for at in covers.edges if begin < at < end)
    runs: list[_Run] = []
    for left, right in pairwise(sorted(cuts)):
        _join(runs, _Run(covers.best(left), left, right - left), apart=left == streamed)
    return _with_stream(recording, [each.part for each in runs], streamed)


@dataclass(slots=True)
class _Run:
    """Consecutive stretches of one party and name."""

    cover: _Cover
    begin: float
    seconds: float

    @property
    def part(self) -> Part:
        cover = self.cover
        return Part(cover.owner, cover.name, self.begin, self.seconds, cover.worker, cover.amount)

    def goes_on(self, cover: _Cover) -> bool:
        """Return whether ``cover`` continues this run; a chunk never does."""
        mine = self.cover
        return (
            mine.name == cover.name != "chunk"
            and mine.owner == cover.owner
            and mine.worker == cover.worker
        )


_REST = _Cover(DEFAULT, 0.0, 0.0, "router", "other")


_Heap = list[tuple[float, float, int, _Cover]]
"""Heap with the most specific and latest on top; ended ones are removed at the top."""


class _Sweep:
    """Search of the relevant cover at each edge in order.

    Each is pushed and popped once: a call may have thousands.
    """

    def __init__(self, covers: Iterator[_Cover]) -> None:
        found = [(each.begin, each.end, each) for each in covers]
        self._coming = sorted((each for each in found if each[1] > each[0]), key=_begin_of)
        self._next = 0
        self.edges = {at for each in self._coming for at in each[:2]}
        self._active: _Heap = []
        self._stopped: dict[str, _Heap] = {}
        """Stopped stretches by worker; the request's holder decides which counts."""
        self._holds: list[tuple[float, str]] = []
        """Ends of attempts' stretches with a worker, the earliest first."""
        self._holders: Counter[str] = Counter()

    def best(self, at: float) -> _Cover:
        """Return the most specific stretch.

        If both workers were stopped, it is that of the request's holder.
        """
        self._enter(at)
        while self._holds and self._holds[0][0] <= at:
            self._holders[heappop(self._holds)[1]] -= 1
        top = _top(self._active, at)
        if top is not None and top.rank > STOPPED:
            return top
        stops = [(name, heap[0]) for name, heap in self._stopped.items() if _top(heap, at)]
        if not stops:
            self._stopped.clear()
            return _REST if top is None else top
        return min(stops, key=lambda each: (self._holders[each[0]] <= 0, each[1]))[1][-1]

    def _enter(self, at: float) -> None:
        while self._next < len(self._coming) and self._coming[self._next][0] <= at:
            begin, end, cover = self._coming[self._next]
            heap = self._active
            if cover.rank == STOPPED:
                heap = self._stopped.setdefault(cover.worker, [])
            elif cover.rank == HELD:
                heappush(self._holds, (end, cover.worker))
                self._holders[cover.worker] += 1
            heappush(heap, (-cover.rank, -begin, self._next, cover))
            self._next += 1


def _begin_of(found: tuple[float, float, _Cover]) -> float:
    return found[0]


def _top(heap: _Heap, at: float) -> _Cover | None:
    while heap and heap[0][-1].end <= at:
        heappop(heap)
    return heap[0][-1] if heap else None


def _join(runs: list[_Run], run: _Run, *, apart: bool) -> None:
    if runs and not apart and runs[-1].goes_on(run.cover):
        runs[-1].seconds += run.seconds
    else:
        runs.append(run)


def _with_stream(recording: Recording, parts: list[Part], since: float) -> list[Part]:
    """Subtract work spread over the tokens from the parts of the stream.

    It is the router's work on each token, and the client's delays.
    """
    inside = [index for index, each in enumerate(parts) if each.begin >= since]
    inside = [index for index in inside if parts[index].name not in _OWN_NAMES]
    total = sum(parts[index].seconds for index in inside)
    writing = min(total, recording.write_seconds)
    waiting = min(total - writing, recording.wait_seconds)
    working = max(0.0, total - writing - waiting)
    spread = writing + working
    order = sorted(inside, key=lambda index: (parts[index].name != "other", -parts[index].seconds))
    order.sort(key=lambda index: parts[index].name not in ("other", "decode"))
    for index in order:
        taken = min(spread, parts[index].seconds)
        parts[index] = replace(parts[index], seconds=parts[index].seconds - taken)
        spread -= taken
    more = (
        Part("router", "text and events", since, working),
        Part("client", "writing to it", since, writing),
    )
    return [each for each in (*parts, *more) if each.seconds > 0]


_OWN_NAMES = frozenset(
    {"read body", "parse", "tokenize", "admission", "hash", "turn", "place", "write"}
)


def _covers(recording: Recording, end: float) -> Iterator[_Cover]:
    for mark in recording.marks:
        owner = "client" if mark.name in ("read body", "write") else "router"
        yield _Cover(OWN, mark.begin, mark.end, owner, mark.name)
    for attempt in recording.attempts:
        yield from _of_attempt(attempt, end)


def _of_attempt(attempt: AttemptRecord, end: float) -> Iterator[_Cover]:
    until = attempt.end if attempt.end is not None else end
    if not attempt.legs:
        return
    holder, decoder = attempt.legs[0], attempt.legs[-1]
    first = min((each.first for each in attempt.legs if each.first is not None), default=until)
    name = "no word of it" if attempt.failure is None else "no word of it, then lost"
    yield _Cover(HELD, attempt.begin, first, holder.role, name, holder.worker)
    yield _Cover(HELD, first, until, decoder.role, "decode", decoder.worker)
    for leg in attempt.legs:
        yield from _of_leg(leg, paired=len(attempt.legs) > 1)


def _of_leg(leg: LegRecord, *, paired: bool) -> Iterator[_Cover]:
    where = placed(leg)
    if where is None or leg.times is None or leg.received_at is None:
        return
    came, _ = where
    decodes = paired and leg.role == "decode"
    if not decodes:
        late = came - leg.sent > TAKEN_LATE_SECONDS
        name = "not taken yet" if late else "on its way"
        yield _Cover(WAY, leg.sent, came, leg.role, name, leg.worker)
        yield _Cover(
            WAY, came + leg.times.sent, leg.received_at, leg.role, "on its way back", leg.worker
        )
    for note in leg.times.notes:
        known = _OF_NOTES.get(note.name)
        if known is None or (decodes and note.name == "queue"):
            continue
        rank, name = known
        begin, end = came + note.begin, came + note.end
        yield _Cover(rank, begin, end, leg.role, name, leg.worker, note.amount)


MAX_CANDIDATES = 64
MAX_SHORT_PARTS = 48
"""Maximum parts in a client's summary; the rest are one part."""


def short(recording: Recording, now: float) -> bytes:
    """Return one line of JSON: parts in milliseconds, roles without addresses."""
    end = recording.ended if recording.ended is not None else now
    content = {
        "request_id": recording.request_id,
        "trace_id": recording.watch.trace_id or None,
        "total_ms": _ms(end - recording.arrived),
        "attempts": len(recording.attempts),
        "parts": _rows(recording, now),
    }
    return msgspec.json.encode(content)


def listed(recording: Recording, now: float) -> dict[str, Any]:
    """Return the fields of a call in a list."""
    zero = recording.arrived
    end = recording.ended if recording.ended is not None else now
    return {
        "request_id": recording.request_id,
        "path": recording.path,
        "status": recording.status or None,
        "started": recording.started,
        "running": recording.ended is None,
        "total_ms": _ms(end - zero),
        "first_token_ms": _since(recording.first_output, zero),
        "num_prompt_tokens": recording.num_prompt,
        "num_tokens": recording.num_tokens,
        "attempts": len(recording.attempts),
        "parts": _rows(recording, now),
    }


def full(recording: Recording, now: float) -> dict[str, Any]:
    """Return all known facts of a call."""
    zero = recording.arrived
    end = recording.ended if recording.ended is not None else now
    return {
        "request_id": recording.request_id,
        "trace_id": recording.watch.trace_id or None,
        "path": recording.path,
        "status": recording.status or None,
        "started": datetime.fromtimestamp(recording.started, UTC).isoformat(),
        "running": recording.ended is None,
        "total_ms": _ms(end - zero),
        "num_prompt_tokens": recording.num_prompt,
        "num_tokens": recording.num_tokens,
        "first_token_ms": _since(recording.first_output, zero),
        "parts": [_part(each, recording) for each in parts_of(recording, now)],
        "attempts": [_attempt(each, zero) for each in recording.attempts],
        "stream": {
            "outputs": recording.num_outputs,
            "waiting_ms": _ms(recording.wait_seconds),
            "writing_ms": _ms(recording.write_seconds),
            "longest_waits": [
                {"end_ms": _ms(at - zero), "ms": _ms(seconds)}
                for seconds, at in sorted(recording.gaps, reverse=True)
            ],
        },
        "dropped": recording.dropped,
    }


def _rows(recording: Recording, now: float) -> msgspec.Raw:
    """Return rows as JSON, cached for ended calls until a worker reports."""
    if recording.ended is None:
        return msgspec.Raw(_encoded_rows(recording, now))
    num_timed = sum(leg.times is not None for each in recording.attempts for leg in each.legs)
    if recording.rows is None or recording.rows[0] != num_timed:
        recording.rows = num_timed, _encoded_rows(recording, now)
    return msgspec.Raw(recording.rows[1])


def _encoded_rows(recording: Recording, now: float) -> bytes:
    """Return owner, name, begin and length of each part in milliseconds."""
    parts = parts_of(recording, now)
    kept = parts[:MAX_SHORT_PARTS]
    rows: list[list[object]] = [[each.owner, each.name, *_times(each, recording)] for each in kept]
    if left := parts[MAX_SHORT_PARTS:]:
        seconds = sum(each.seconds for each in left)
        rows.append(["all", "further parts", _times(left[0], recording)[0], _ms(seconds)])
    return msgspec.json.encode(rows)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _since(at: float | None, zero: float) -> float | None:
    return None if at is None else _ms(at - zero)


def _times(part: Part, recording: Recording) -> tuple[float, float]:
    return _ms(part.begin - recording.arrived), _ms(part.seconds)


def _part(part: Part, recording: Recording) -> dict[str, Any]:
    begin, ms = _times(part, recording)
    result: dict[str, Any] = {"owner": part.owner, "name": part.name, "begin_ms": begin, "ms": ms}
    if part.worker:
        result["worker"] = part.worker
    if part.amount:
        result["amount"] = part.amount
    return result


def _attempt(attempt: AttemptRecord, zero: float) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "kind": attempt.attempt_kind,
        "rule": attempt.rule,
        "begin_ms": _ms(attempt.begin - zero),
        "end_ms": _since(attempt.end, zero),
        "failure": attempt.failure,
        "failed_worker": attempt.failed_worker,
        "legs": [_leg(each, zero) for each in attempt.legs],
        "candidates": _candidates(attempt),
    }


def _leg(leg: LegRecord, zero: float) -> dict[str, Any]:
    where = placed(leg)
    result: dict[str, Any] = {
        "role": leg.role,
        "worker": leg.worker,
        "sent_ms": _ms(leg.sent - zero),
        "accepted_ms": _since(leg.accepted, zero),
        "first_ms": _since(leg.first, zero),
    }
    if where is None or leg.times is None:
        return {**result, "notes": None}
    came, off = where
    return {
        **result,
        "came_ms": _ms(came - zero),
        "off_by_at_most_ms": _ms(off),
        "notes": [_note(each, came - zero) for each in leg.times.notes],
        "dropped": leg.times.dropped,
    }


def _note(note: Note, came: float) -> dict[str, Any]:
    seconds = note.end - note.begin
    result: dict[str, Any] = {
        "name": note.name,
        "begin_ms": _ms(came + note.begin),
        "ms": _ms(seconds),
    }
    if note.amount:
        result["amount"] = note.amount
    if note.name in ("part", "load") and note.amount and seconds > 0:
        result["gb_per_s"] = round(note.amount / seconds / 1e9, 4)
    return result


def _candidates(attempt: AttemptRecord) -> list[dict[str, Any]]:
    """Return each worker that was up at the placement, with its numbers."""
    scene = attempt.scene
    if not isinstance(scene, Scene):
        return []
    chosen = {each.worker for each in attempt.legs}
    views = scene.fleet.workers[:MAX_CANDIDATES]
    return [_candidate(each, scene, chosen=each.name in chosen) for each in views]


def _candidate(view: WorkerView, scene: Scene, *, chosen: bool) -> dict[str, Any]:
    facts: PromptFacts = scene.facts
    paces = {
        pair: throughput
        for pair, throughput in scene.fleet.paces.items()
        if pair[0] == view.incarnation
    }
    result: dict[str, Any] = {
        "worker": view.name,
        "role": str(view.role),
        "chosen": chosen,
        "cached_tokens": facts.hits.get(view.incarnation, 0),
        "pending_tokens": view.pending_tokens,
        "requests": view.num_requests,
        "free_share": round(view.free_share, 4),
        "prefill_tokens_per_s": round(view.prefill_tokens_per_s, 1),
    }
    if view.role is WorkerRole.PREFILL:
        result["link_wait_ms"] = _ms(max((_wait(each) for each in paces.values()), default=0.0))
    flags = ("draining", "suspect")
    result.update({name: True for name in flags if getattr(view, name)})
    return result


def _wait(throughput: LinkThroughput) -> float:
    return throughput.wait
