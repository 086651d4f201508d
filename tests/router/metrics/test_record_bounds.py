"""What a record holds, and what looking at it takes, is bounded whatever clients send."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass, field
from typing import Any

from tests.router.builders import inc, make_request, view

from tandem.protocol.card import WorkerRole
from tandem.protocol.recording import Recording
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import Watch
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.recorder import Scene, begin_attempt
from tandem.router.placement.base import Placement
from tandem.router.placement.snapshot import FleetSnapshot, LinkPace, PromptFacts
from tandem.router.timeline.recorder import Recorder
from tandem.router.timeline.ring import weigh


@dataclass
class FakeSpan:
    """Counts who was begun under it."""

    traceparent: str = ""
    children: list[FakeSpan] = field(default_factory=list)

    def child(self, name: str, begin: float, *_: Any) -> FakeSpan:
        """One more."""
        self.children.append(FakeSpan(f"child {len(self.children)}"))
        return self.children[-1]


async def sent(
    recording: Recording, request: EngineCoreRequest, scene: Scene | None = None
) -> Watch:
    """One more attempt."""
    attempt = Attempt(1, Placement(inc(1), None, "rule"), asyncio.get_running_loop())
    return begin_attempt(recording, attempt, "first", request, scene)


async def test_a_record_holds_nothing_of_a_requests_own_size() -> None:
    """Lists, words and schemas are let go of with their request; numbers stay where spans tell."""
    request = make_request(allowed_token_ids=list(range(100_000)), top_p=0.5, n=2)
    for span in (None, FakeSpan("root")):
        recording = Recording("a", 0.0, span=span)
        await sent(recording, request)
        assert len(pickle.dumps(recording)) < 5_000
    assert recording.asked is not None
    assert recording.asked["gen_ai.request.top_p"] == 0.5
    assert recording.asked["gen_ai.request.choice.count"] == 2


async def test_paths_and_fleets_weigh_what_they_hold() -> None:
    """A path is cut; links and their paces, one for each pair of workers, count."""
    scope = {"path": "/v1/" + "x" * 60_000, "method": "POST", "headers": []}
    recording = Recorder(1, 1 << 20).open(scope, "a", 0.0)
    assert recording is not None
    assert len(recording.path) < 1_000
    longer = Recording("a", 0.0, path=recording.path)
    assert weigh(longer) - weigh(Recording("a", 0.0)) == len(recording.path)
    prefill = [view(number, WorkerRole.PREFILL) for number in range(16)]
    decode = [view(16 + number, WorkerRole.DECODE) for number in range(16)]
    pairs = [(p.incarnation, d.incarnation) for p in prefill for d in decode]
    paces = {pair: LinkPace(1.0, 2, 3.0) for pair in pairs}
    fleet = FleetSnapshot((*prefill, *decode), frozenset(pairs), paces)
    await sent(recording, make_request(), Scene(PromptFacts(num_tokens=40), fleet))
    assert weigh(recording) > 256 * 400
