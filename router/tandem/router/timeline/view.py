"""A record as JSON: in full for operators, and in short for the client of the call."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from tandem.protocol.card import WorkerRole
from tandem.protocol.recording import AttemptRecord, LegRecord, Recording
from tandem.protocol.timeline import Note
from tandem.router.dispatch.recorder import Scene
from tandem.router.placement.snapshot import LinkPace, PromptFacts, WorkerView
from tandem.router.timeline.parts import Part, parts_of, placed

MAX_CANDIDATES = 64
MAX_SHORT_PARTS = 48
"""Parts that a client is sent; the rest are summed up in one."""


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
    """Return the fields of one call in a list of calls."""
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
    """Return rows as JSON. Those of an ended call are made once, and again when a worker has
    reported its part since: views request the same calls every second."""
    if recording.ended is None:
        return msgspec.Raw(_encoded_rows(recording, now))
    told = sum(leg.times is not None for each in recording.attempts for leg in each.legs)
    if recording.rows is None or recording.rows[0] != told:
        recording.rows = told, _encoded_rows(recording, now)
    return msgspec.Raw(recording.rows[1])


def _encoded_rows(recording: Recording, now: float) -> bytes:
    """Return owner, name, begin and length of each part, in milliseconds; many last ones as one."""
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
    said: dict[str, Any] = {"owner": part.owner, "name": part.name, "begin_ms": begin, "ms": ms}
    if part.worker:
        said["worker"] = part.worker
    if part.amount:
        said["amount"] = part.amount
    return said


def _attempt(attempt: AttemptRecord, zero: float) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "rung": attempt.rung,
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
    said: dict[str, Any] = {
        "role": leg.role,
        "worker": leg.worker,
        "sent_ms": _ms(leg.sent - zero),
        "accepted_ms": _since(leg.accepted, zero),
        "first_ms": _since(leg.first, zero),
    }
    if where is None or leg.times is None:
        return {**said, "notes": None}
    came, off = where
    return {
        **said,
        "came_ms": _ms(came - zero),
        "off_by_at_most_ms": _ms(off),
        "notes": [_note(each, came - zero) for each in leg.times.notes],
        "dropped": leg.times.dropped,
    }


def _note(note: Note, came: float) -> dict[str, Any]:
    seconds = note.end - note.begin
    said: dict[str, Any] = {
        "name": note.name,
        "begin_ms": _ms(came + note.begin),
        "ms": _ms(seconds),
    }
    if note.amount:
        said["amount"] = note.amount
    if note.name in ("part", "load") and note.amount and seconds > 0:
        said["gb_per_s"] = round(note.amount / seconds / 1e9, 4)
    return said


def _candidates(attempt: AttemptRecord) -> list[dict[str, Any]]:
    """Return each worker that was up when the attempt was placed, with the numbers that decided."""
    scene = attempt.scene
    if not isinstance(scene, Scene):
        return []
    chosen = {each.worker for each in attempt.legs}
    views = scene.fleet.workers[:MAX_CANDIDATES]
    return [_candidate(each, scene, chosen=each.name in chosen) for each in views]


def _candidate(view: WorkerView, scene: Scene, *, chosen: bool) -> dict[str, Any]:
    facts: PromptFacts = scene.facts
    paces = {pair: pace for pair, pace in scene.fleet.paces.items() if pair[0] == view.incarnation}
    said: dict[str, Any] = {
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
        said["link_wait_ms"] = _ms(max((_wait(each) for each in paces.values()), default=0.0))
    flags = ("draining", "suspect")
    said.update({name: True for name in flags if getattr(view, name)})
    return said


def _wait(pace: LinkPace) -> float:
    return pace.wait
