"""Clients that read their answers slowly, or not at all: each holds one message of memory."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tests.router.http_server import ANSWER
from tests.router.rpc.raw_client import (
    SERVICE,
    SMALL_WINDOW,
    RawClient,
    asked,
    status_of,
    texts,
)
from tests.waiting import wait_for

from tandem.router.api.grpc import inference
from tandem.router.api.grpc import tandem_pb2 as pb
from tandem.router.api.grpc.inference import step_message

OK = grpc.StatusCode.OK
LONG = asked(sampling=pb.SamplingParams(max_tokens=200), stream=True, request_id="it")


def test_an_answer_that_is_not_read_holds_one_message(
    raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is made when it is sent; a client that reads later has all of them."""
    steps: list[bytes] = []

    def counted(*given: Any) -> bytes:
        steps.append(step_message(*given))
        return steps[-1]

    monkeypatch.setattr(inference, "step_message", counted)
    served, client = raw(options=SMALL_WINDOW)
    unread = client.start(LONG)
    worker = served.workers[0]
    wait_for(lambda: worker.submitted)
    read = RawClient(client.port)
    others = list(read.start(LONG))
    wait_for(lambda: not worker._turns)  # all steps of both have come
    assert len(steps) == len(others) + 1
    assert texts(others) == texts(unread) == ANSWER
    read.close()


@pytest.mark.parametrize("method", ["Embed", "Generate"])
def test_an_answer_that_is_not_read_in_time_is_given_up(raw: Any, method: str) -> None:
    """Its call ends and is counted, and other calls of the connection are answered."""
    served, client = raw(write_timeout=0.3, options=SMALL_WINDOW)
    embed = pb.EmbedRequest(input=["Hi"] * 5).SerializeToString()
    unread = client.start(LONG if method == "Generate" else embed, path=SERVICE + method)

    wait_for(lambda: "tandem:router_requests_cancelled_total 1.0" in served.metrics())
    assert not served.app.state.rpc._calls
    wait_for(lambda: client.status(asked())[0] is OK)
    code, words = status_of(unread)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert words == "the client does not read its answer"


def test_abort_ends_a_call_that_is_not_read(raw: Any) -> None:
    """It ends before the client reads, and its status is ABORTED when the client does."""
    served, client = raw(options=SMALL_WINDOW)
    stuck = client.start(LONG)
    wait_for(lambda: served.workers[0].submitted)
    request = pb.AbortRequest(request_id="it").SerializeToString()
    (answer,) = client.start(request, path=SERVICE + "Abort")

    assert pb.AbortResponse.FromString(answer).aborted == 1
    wait_for(lambda: not served.app.state.rpc._calls)
    assert status_of(stuck) == (grpc.StatusCode.ABORTED, "the call it was aborted")
