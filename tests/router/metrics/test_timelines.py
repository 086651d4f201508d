"""A call's record: bounded, cut into parts that add up, and nothing where it is off."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import httpx
import msgspec
import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.protocol.timeline import MAX_NOTES, LegTimes, Note, NoteBook, Watch
from tandem.router.observe.timeline.recorder import Recorder, Ring, weigh
from tandem.router.observe.timeline.view import parts_of, placed
from tandem.router.tenant import NO_KEYS
from tandem.tracing.recording import (
    MAX_GAPS,
    MAX_MARKS,
    AttemptRecord,
    LegRecord,
    Recording,
    begin,
    current,
    marked,
)


def recorded() -> Recording:
    """A call of ten seconds by a pair; P takes it after one, and stands still for two."""
    recording = Recording("a", 100.0)
    recording.mark("tokenize", 100.1, 100.4)
    prefill = LegRecord("prefill", "P", 100.5, received_at=106.0, first=106.0)
    prefill.times = LegTimes(
        "r",
        0,
        4.5,
        (Note("queue", 0.0, 0.5), Note("chunk", 0.5, 4.4, 7), Note("stopped", 1.0, 3.0, 1)),
    )
    decode = LegRecord("decode", "D", 100.5, received_at=109.0, first=107.0)
    decode.times = LegTimes("r", 0, 8.4, (Note("load", 4.0, 5.8, 9), Note("decode", 6.0, 8.4)))
    attempt = AttemptRecord(0, "hand-off", "first", 100.5, legs=[prefill, decode])
    recording.attempt(attempt)
    recording.output(1)
    recording.first_output = 106.0
    recording.waited(106.0, 107.5)
    recording.write_seconds = 1.0
    recording.ended = 110.0
    return recording


def test_parts_add_up_and_name_who_held_the_request() -> None:
    """No instant is counted twice or left out; a stop is the stopped worker's."""
    parts = parts_of(recorded(), 0.0)
    assert abs(sum(each.seconds for each in parts) - 10.0) < 1e-6
    by_name = {(each.owner, each.name): each.seconds for each in parts}
    assert abs(by_name["prefill", "stood still"] - 2.0) < 1e-6
    assert abs(by_name["prefill", "not taken yet"] - 1.0) < 0.01
    assert abs(by_name["router", "tokenize"] - 0.3) < 1e-6
    assert abs(by_name["client", "writing to it"] - 1.0) < 1e-6
    assert abs(by_name["router", "text and events"] - 1.5) < 1e-6
    assert all(each.seconds > 0 for each in parts)


@pytest.mark.parametrize(("begin", "end", "own"), [(1.8, 2.1, 0.1), (3.7, 4.2, 0.3)])
def test_who_held_the_request_stood_still_where_both_did(
    begin: float, end: float, own: float
) -> None:
    """The starved decode worker, which had nothing to do yet, hides nothing of P's stop."""
    recording = recorded()
    prefill, decode = recording.attempts[0].legs
    assert prefill.times is not None
    assert decode.times is not None
    notes = *decode.times.notes, Note("stopped", begin, end, 1)
    decode.times = msgspec.structs.replace(decode.times, notes=notes)
    by_name = {(each.owner, each.name): each.seconds for each in parts_of(recording, 0.0)}
    assert abs(by_name["prefill", "stood still"] - 2.0) < 1e-6
    assert abs(by_name["decode", "stood still"] - own) < 0.01


def test_a_failed_attempt_is_its_holders_time() -> None:
    """A worker that never spoke had the request until it was lost."""
    recording = Recording("a", 0.0)
    leg = LegRecord("prefill", "P", 0.1)
    recording.attempt(AttemptRecord(0, "", "first", 0.1, [leg], end=5.0, failure="lost"))
    recording.ended = 6.0
    parts = parts_of(recording, 0.0)
    lost = [each for each in parts if each.worker == "P"]
    assert [each.name for each in lost] == ["no word of it, then lost"]
    assert abs(lost[0].seconds - 4.9) < 1e-6
    assert abs(sum(each.seconds for each in parts) - 6.0) < 1e-6


def test_a_worker_is_placed_between_the_routers_own_times() -> None:
    """Never before it was sent, never after its word that it took the request."""
    leg = LegRecord("prefill", "P", 10.0, accepted=10.2, received_at=13.0)
    leg.times = LegTimes("r", 0, 2.0)
    came, off = placed(leg) or (0.0, 0.0)
    assert came == 10.2
    assert abs(off - 1.0) < 1e-9
    leg.accepted = None
    came, _ = placed(leg) or (0.0, 0.0)
    assert 10.0 <= came <= 11.0
    leg.times = LegTimes("r", 0, 50.0)  # whatever a worker says of itself
    came, off = placed(leg) or (0.0, 1.0)
    assert (came, off) == (10.0, 0.0)


def test_the_ring_is_bounded_in_number_and_in_bytes() -> None:
    """The oldest go; what a call grew to counts when it is over."""
    ring = Ring(3, 1 << 20)
    calls = [Recording(f"call-{number}", 0.0) for number in range(5)]
    for each in calls:
        ring.open(each)
    assert (len(ring), ring.held) == (0, 0)
    assert ring.find("call-1", NO_KEYS) is calls[1]
    for each in calls:
        ring.close(each)
    assert len(ring) == 3
    assert ring.find("call-1", NO_KEYS) is None
    assert ring.find("cmpl-call-4", NO_KEYS) is calls[4]
    stranger = Recording("stranger", 0.0, status=401)
    ring.open(stranger)
    ring.close(stranger)
    assert ring.find("stranger", NO_KEYS) is None
    assert ring.find("call-2", NO_KEYS) is calls[2]
    small = Ring(1000, 10 * weigh(calls[0]))
    for number in range(50):
        small.close(Recording(f"call-{number % 10}", 0.0))
    assert len(small) == 10
    assert small.held <= small.max_bytes
    grown = Recording("grown", 0.0)
    grown.attempt(AttemptRecord(0, "", "first", 0.0, [LegRecord("prefill", "P", 0.0)]))
    grown.attempts[0].legs[0].times = LegTimes("r", 0, 1.0, (Note("chunk", 0, 1),) * MAX_NOTES)
    small.close(grown)
    assert small.held <= small.max_bytes


def test_one_call_holds_no_more_than_its_bounds() -> None:
    """Marks, notes and gaps beyond are counted, not kept; the longest gaps stay."""
    recording = Recording("a", 0.0)
    for number in range(MAX_MARKS + 5):
        recording.mark("parse", number, number + 1)
    assert (len(recording.marks), recording.dropped) == (MAX_MARKS, 5)
    recording.output(1)
    for number in range(100):
        recording.waited(0.0, float(number))
    assert sorted(seconds for seconds, _ in recording.gaps) == list(range(100 - MAX_GAPS, 100))
    book = NoteBook(None, Watch("a"), 0.0)  # type: ignore[arg-type]
    for number in range(MAX_NOTES + 7):
        book.add("chunk", number, number + 1)
    assert (len(book.notes), book.dropped) == (MAX_NOTES, 7)


def _parse_in(recording: Recording) -> None:
    begin(recording)
    with marked("parse"):
        pass


def test_where_it_is_off_nothing_is_recorded() -> None:
    """No record is made, and a mark does nothing."""
    recorder = Recorder(0, 1 << 20)
    scope = {"path": "/v1/completions", "method": "POST"}
    assert recorder.open(scope, "a", 0.0) is None
    assert current() is None
    with marked("parse"):
        pass
    assert Recorder(1, 1 << 20).open({**scope, "path": "/health"}, "a", 0.0) is None
    mine = Recording("b", 0.0)
    contextvars.copy_context().run(_parse_in, mine)  # other tests have no record
    assert [each.name for each in mine.marks] == ["parse"]


def status(served: Served, answer: httpx.Response) -> int:
    return clear_text.get(f"{served.url}/debug/requests/{answer.json()['id']}").status_code


def test_calls_are_kept_as_many_as_the_router_is_told(
    serve: Callable[..., Served],
    prefill: Callable[..., FakeWorker],
    decode: Callable[..., FakeWorker],
):
    """By id of the call or of the answer; none where none are to be kept, and then no header."""
    headers = {"x-tandem-timeline": "1"}
    body = {"model": "fake", "prompt": "Tell me", "max_tokens": 4}
    kept = serve(prefill(), decode(), timeline_requests=2, timeline_mib=1)
    answers = [kept.post("/v1/completions", json=body, headers=headers) for _ in range(3)]
    assert all("x-tandem-timeline" in each.headers for each in answers)
    found = [status(kept, each) for each in answers]
    assert found == [404, 200, 200]
    none = serve(prefill(), decode(), timeline_requests=0)
    answer = none.post("/v1/completions", json=body, headers=headers)
    assert "x-tandem-timeline" not in answer.headers
    assert status(none, answer) == 404
