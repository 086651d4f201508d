"""What a record holds, and what looking at it takes, is bounded whatever clients send."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from tests.router.builders import inc, make_request
from tests.router.builders import view as seen

from tandem.protocol.card import WorkerRole
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import LegTimes, Note, Watch
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.explain import AttemptRecorder
from tandem.router.dispatch.job import Job, Scene
from tandem.router.metrics import RouterMetrics
from tandem.router.observe.timeline import view
from tandem.router.observe.timeline import view as parts
from tandem.router.observe.timeline.recorder import Recorder, weigh
from tandem.router.placement.policy import Placement
from tandem.router.placement.snapshot import FleetSnapshot, LinkThroughput, PromptFacts
from tandem.tracing.recording import MAX_ATTEMPTS, AttemptRecord, LegRecord, Recording


@dataclass
class FakeSpan:
    traceparent: str = ""
    children: list[FakeSpan] = field(default_factory=list)

    def child(self, name: str, begin: float, *_: Any) -> FakeSpan:
        self.children.append(FakeSpan(f"child {len(self.children)}"))
        return self.children[-1]


async def sent(
    recording: Recording, request: EngineCoreRequest, scene: Scene | None = None
) -> Watch:
    attempt = Attempt(1, Placement(inc(1), None, "rule"), asyncio.get_running_loop())
    job = Job(request, name="1", deadline=1.0, max_attempts=3, metrics=RouterMetrics())
    job.scene = scene
    AttemptRecorder(recording).sent(job, attempt)
    assert attempt.watch is not None
    return attempt.watch


async def test_a_record_holds_nothing_of_a_requests_own_size() -> None:
    """Lists, words and schemas are let go of with their request; numbers stay where spans tell."""
    request = make_request(allowed_token_ids=list(range(100_000)), top_p=0.5, n=2)
    untold, recording = Recording("a", 0.0), Recording("a", 0.0, span=FakeSpan("root"))
    for each in (untold, recording):
        await sent(each, request)
        assert len(pickle.dumps(each)) < 5_000
    assert untold.asked is None
    assert recording.asked is not None
    assert recording.asked["gen_ai.request.top_p"] == 0.5
    assert recording.asked["gen_ai.request.choice.count"] == 2


async def test_attempts_beyond_the_kept_ones_begin_no_span() -> None:
    """Nobody would end it; their workers' spans stand under the call's own."""
    recording = Recording("a", 0.0, span=FakeSpan("root"), traceparent="root")
    watches = [await sent(recording, make_request()) for _ in range(MAX_ATTEMPTS + 1)]
    assert watches[-2].traceparent == f"child {MAX_ATTEMPTS - 1}"
    assert watches[-1].traceparent == "root"
    assert len(recording.span.children) == len(recording.attempts) == MAX_ATTEMPTS


async def test_paths_and_fleets_weigh_what_they_hold() -> None:
    """A path is cut; links and their paces, one for each pair of workers, count."""
    scope = {"path": "/v1/" + "x" * 60_000, "method": "POST", "headers": []}
    recording = Recorder(1, 1 << 20).open(scope, "a", 0.0)
    assert recording is not None
    assert len(recording.path) < 1_000
    longer = Recording("a", 0.0, path=recording.path)
    assert weigh(longer) - weigh(Recording("a", 0.0)) == len(recording.path)
    prefill = [seen(number, WorkerRole.PREFILL) for number in range(16)]
    decode = [seen(16 + number, WorkerRole.DECODE) for number in range(16)]
    pairs = [(p.incarnation, d.incarnation) for p in prefill for d in decode]
    paces = {pair: LinkThroughput(1.0, 2) for pair in pairs}
    fleet = FleetSnapshot((*prefill, *decode), frozenset(pairs), paces)
    await sent(recording, make_request(), Scene(PromptFacts(num_tokens=40), fleet))
    assert weigh(recording) > 256 * 400


def noted(num_notes: int) -> Recording:
    """A call that is over, whose 16 attempts ran at once, each worker with so many notes."""
    recording = Recording("a", 0.0, ended=100.0)
    for number in range(16):
        record = AttemptRecord(number, "", "first", 1.0 + number / 100, end=90.0)
        for role in ("prefill", "decode"):
            leg = LegRecord(
                role, f"{role} {number % 4}", record.begin, received_at=90.0 + number / 100
            )
            span = 80.0 / num_notes  # seconds of each
            notes = [Note("chunk", span * at, span * (at + 1), 7) for at in range(num_notes)]
            notes[1::4] = [Note("stopped", each.begin, each.end) for each in notes[1::4]]
            leg.times = LegTimes("r", 0, 85.0, tuple(notes))
            record.legs.append(leg)
        recording.attempt(record)
    return recording


def test_cutting_a_call_takes_as_long_as_it_has_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    class Counted(parts._Cover):
        """One whose looks at its times are counted."""

        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += name in ("begin", "end")
            return super().__getattribute__(name)

    monkeypatch.setattr(parts, "_Cover", Counted)
    parts.parts_of(noted(20), 0.0)
    few, looks = looks, 0
    found = parts.parts_of(noted(40), 0.0)
    assert 0 < looks <= 3 * few
    assert abs(sum(each.seconds for each in found) - 100.0) < 1e-6


def test_rows_of_a_call_that_is_over_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all views that ask again and again, until a worker's last word comes late."""
    cut: list[Recording] = []

    parts_of = parts.parts_of

    def counted(recording: Recording, now: float) -> list[parts.Part]:
        cut.append(recording)
        return parts_of(recording, now)

    monkeypatch.setattr(view, "parts_of", counted)
    recording = noted(4)
    late, recording.attempts[0].legs[0].times = recording.attempts[0].legs[0].times, None
    first = msgspec.json.encode(view.listed(recording, 0.0))
    assert msgspec.json.encode(view.listed(recording, 1.0)) == first
    assert json.loads(view.short(recording, 2.0))["parts"] == json.loads(first)["parts"]
    assert len(cut) == 1
    recording.attempts[0].legs[0].times = late
    assert msgspec.json.encode(view.listed(recording, 0.0)) != first
    assert len(cut) == 2
    recording.ended = None
    for now in (200.0, 300.0):
        rows = json.loads(view.short(recording, now))["parts"]
        assert sum(row[3] for row in rows) == pytest.approx(now * 1000)
