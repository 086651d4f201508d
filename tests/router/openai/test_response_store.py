"""Responses that a router keeps: how many, how large, how long, and what goes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.protocol.errors import FailCause
from tandem.router.api.openai.responses.store import (
    OVERHEAD,
    ResponseStore,
    Turn,
    earlier_items,
    encoded,
    input_items,
)

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
BODY: Any = {"input": "Hi", "max_output_tokens": 2}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock | None = None, **bounds: Any) -> ResponseStore:
    """A store with large bounds, but for those given."""
    fields = {"most": 100, "most_bytes": 1 << 20, "seconds": 60.0, **bounds}
    return ResponseStore(**fields, clock=clock or Clock())


def turn(text: str, before: Turn | None = None) -> Turn:
    return Turn(before, encoded([{"id": f"q{text}"}]), encoded([{"id": f"a{text}"}]))


def test_what_was_used_longest_ago_goes_for_one_too_many() -> None:
    """Asking for a response makes it young."""
    kept = store(most=2)
    for name in "ab":
        kept.put("", name, b"{}", turn(name))
    assert kept.get("", "a")
    kept.put("", "c", b"{}", turn("c"))

    assert [name for name in "abc" if kept.get("", name)] == ["a", "c"]


def test_what_is_old_goes() -> None:
    clock = Clock()
    kept = store(clock, seconds=10)
    kept.put("", "a", b"{}", turn("a"))
    kept.put("", "b", b"{}", turn("b"))
    clock.now = 8
    assert kept.get("", "a")
    clock.now = 16

    assert kept.get("", "b") is None
    assert kept.get("", "a")
    assert len(kept) == 1


def test_bytes_are_bounded_and_counted_once() -> None:
    """Turns of one conversation share what came before, which stays while any of them does."""
    kept = store()
    first = turn("1")
    second = turn("2", first)
    kept.put("", "a", b"{}", first)
    kept.put("", "b", b"{}", second)
    both = 2 * (2 + OVERHEAD) + first.size + second.size
    assert kept.num_bytes == both
    assert kept.remove("", "a")
    assert kept.num_bytes == both - 2 - OVERHEAD
    found = kept.get("", "b")
    assert found is not None
    assert [each["id"] for each in earlier_items(found.turn)] == ["q1", "a1", "q2", "a2"]
    assert [each["id"] for each in input_items(found.turn)] == ["q1", "a1", "q2"]
    kept.put("", "c", b"{}", turn("3", second))
    assert kept.remove("", "b")
    assert kept.remove("", "c")
    assert kept.num_bytes == 0

    small = store(most_bytes=3 * OVERHEAD)
    for name in "abcd":
        small.put("", name, b"x" * 100, turn(name))
        assert small.num_bytes <= 3 * OVERHEAD
    small.put("", "e", b"x" * 3 * OVERHEAD, turn("e"))
    assert [name for name in "abcde" if small.get("", name)] == ["c", "d"]


def test_the_history_is_held_though_it_was_forgotten_while_a_turn_was_answered() -> None:
    """The new turn brings it back, counted."""
    kept = store()
    first = turn("1")
    kept.put("", "a", b"{}", first)
    kept.remove("", "a")
    second = turn("2", first)
    kept.put("", "b", b"{}", second)

    assert kept.num_bytes == 2 + OVERHEAD + first.size + second.size


def test_the_flags_reach_the_store(serve: Serve, decode: Make) -> None:
    """Number, bytes and age; with none kept a turn goes on from nothing."""
    served = serve(decode(), max_stored_responses=1)
    first, second = (served.post("/v1/responses", json=BODY).json()["id"] for _ in range(2))
    more = [
        served.post("/v1/responses", json={**BODY, "previous_response_id": name}).status_code
        for name in (first, second)
    ]
    assert more == [404, 200]
    for fields in ({"max_stored_responses": 0}, {"max_stored_response_bytes": 1_024}):
        none = serve(decode(), **fields)
        none.post("/v1/responses", json=BODY)
        assert len(none.app.state.responses) == 0
    brief = serve(decode(), stored_response_ttl=0.05)
    name = brief.post("/v1/responses", json=BODY).json()["id"]
    again = {**BODY, "previous_response_id": name}

    def is_gone() -> bool:
        store: ResponseStore = brief.app.state.responses
        store._forget_old()
        return len(store) == 0

    wait_for(is_gone)
    assert brief.post("/v1/responses", json=again).status_code == 404


def test_items_of_all_turns_are_bounded(serve: Serve, decode: Make) -> None:
    served = serve(decode(), max_messages=3)
    item = {"role": "user", "content": "Hi"}
    first = served.post("/v1/responses", json={**BODY, "input": [item, item]})
    wide = served.post("/v1/responses", json={**BODY, "input": [item] * 4})
    more = {**BODY, "previous_response_id": first.json()["id"]}
    long = served.post("/v1/responses", json=more)

    assert first.status_code == 200
    for answer in (wide, long):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        assert "at most 3 entries; it has 4" in answer.json()["error"]["message"]


def test_a_client_that_leaves_stops_the_work_and_nothing_is_kept(
    serve: Serve, decode: Make
) -> None:
    worker = decode(step=0.05)
    served = serve(worker)
    with (
        served.client() as client,
        client.responses.create(model="fake", input="Hi", stream=True) as stream,
    ):
        assert next(iter(stream)).type == "response.created"
    wait_for(lambda: worker.cancelled)

    assert len(served.app.state.responses) == 0


def test_a_stream_that_breaks_off_ends_with_its_failure(serve: Serve, decode: Make) -> None:
    """response.failed, numbered as all events, with what it has; it is not kept."""

    def break_off(turn: Any) -> Any:
        turn.accept()
        yield 0.0
        turn.token(0)
        yield 0.05
        turn.fail(FailCause.INTERNAL)

    served = serve(decode(behaviour=break_off), max_attempts=1)
    with served.client() as client:
        events: list[Any] = list(client.responses.create(model="fake", input="Hi", stream=True))
    last = events[-1]

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"
    assert last.response.output[0].status == "incomplete"
    assert len(served.app.state.responses) == 0
