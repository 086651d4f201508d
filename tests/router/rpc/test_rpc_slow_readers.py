"""Clients that take their answers slowly, or not at all: nothing is held for them without end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from h2.events import DataReceived, StreamReset
from tests.router.http_server import Served
from tests.router.rpc.raw_client import asked, framed
from tests.waiting import wait_for

from tandem.router.rpc import tandem_pb2 as pb

ABORT = "/tandem.v1.Inference/Abort"


def is_of(stream: int, *kinds: type[Any]) -> Callable[[Any], bool]:
    """Whether an event is one of the kinds, of a stream."""
    return lambda event: isinstance(event, kinds) and event.stream_id == stream


def num_calls(served: Served) -> int:
    """Calls that hold a place."""
    return sum(len(each.calls) for each in served.app.state.rpc._connections)


def test_abort_ends_a_call_whose_client_takes_nothing(raw: Any) -> None:
    """A message was cut short by the client's window, and so the stream is reset."""
    served, client = raw()
    client.greet(INITIAL_WINDOW_SIZE=10)
    stuck = client.ask(asked(request_id="stuck", stream=True))
    client.until(is_of(stuck, DataReceived), acknowledge=False)
    abort = client.ask(framed(pb.AbortRequest(request_id="stuck").SerializeToString()), path=ABORT)
    reset: Any = client.until(is_of(stuck, StreamReset), acknowledge=False)

    assert reset is not None
    assert client.status(abort) == ("0", "")
    assert pb.AbortResponse.FromString(client.data(abort)[5:]).aborted == 1
    wait_for(lambda: num_calls(served) == 0)
