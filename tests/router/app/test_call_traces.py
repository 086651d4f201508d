"""The layer around all calls: what it logs of them, and the spans that it has begun."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.router.http.middleware import Trace
from tandem.router.metrics import RouterMetrics
from tandem.router.observe.timeline.recorder import Recorder


async def ask(path: str, *headers: tuple[bytes, bytes], **kept: Any) -> None:
    """A call that is answered with 404, if ``route`` names no template."""
    route = kept.pop("route", None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if route is not None:
            scope["route"] = SimpleNamespace(path=route)
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def nothing(*_: Any) -> Any:
        """A client that says nothing, and is told what it may be."""

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    await Trace(app, RouterMetrics("m"), **kept)(scope, nothing, nothing)


@pytest.mark.parametrize("path", ["/v1/a\n12:00:00 E tandem.router: forged\x1b[2J", "/v1/\u2028é"])
async def test_a_call_is_one_line_of_the_log(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its path decodes to: no second line, and nothing that a terminal obeys."""
    with caplog.at_level(logging.INFO, "tandem.access"):
        await ask(path, log=True)
        await ask("/v1/models/a:b@c+d", log=True)
    odd, usual = (record.getMessage() for record in caplog.records)
    assert odd.isascii()
    assert odd.isprintable()
    assert odd.startswith("POST /v1/")
    assert usual.startswith("POST /v1/models/a:b@c+d 404 ")


class FakeSpan:
    """Keeps what it is told at its end."""

    sampled = True
    traceparent = "own"

    def __init__(self, *began: Any) -> None:
        self.began = began
        self.said: dict[str, Any] = {}

    def end(self, at: float, attributes: dict[str, Any], error: str | None = None) -> None:
        self.said = attributes


class FakeSpans:
    def __init__(self) -> None:
        self.made: list[FakeSpan] = []

    def begin(self, name: str, begin: float, *parent: str) -> FakeSpan:
        self.made.append(FakeSpan(name, *parent))
        return self.made[-1]

    def later(self, work: Callable[[], None]) -> None:
        work()


@pytest.mark.parametrize(
    ("path", "route", "name"),
    [
        ("/v1/chat/completions", "/v1/chat/completions", "chat"),
        ("/v1/responses/resp_1/cancel", "/v1/responses/{response_id}/cancel", "call"),
        ("/v1/zz-random", None, "call"),
        ("/v1/zz/completions", None, "call"),
    ],
)
async def test_spans_have_no_names_of_strangers(path: str, route: str | None, name: str) -> None:
    """Collectors make series of names and routes: there are as many as the router serves."""
    spans: Any = FakeSpans()
    await ask(path, route=route, recorder=Recorder(0, 1, spans=spans))
    (span,) = spans.made
    assert span.began[0] == span.said["gen_ai.operation.name"] == name
    assert span.said.get("http.route") == route


TRACE = f"-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    ("named", "followed"),
    [
        (["00" + TRACE], "00" + TRACE),
        (["cc" + TRACE], "00" + TRACE),
        (["cc" + TRACE + "-what.the=future"], "00" + TRACE),
        (["00" + TRACE + "-more"], ""),
        (["cc" + TRACE + ".more"], ""),
        (["ff" + TRACE], ""),
        ([f"00-{'0' * 32}-{'b' * 16}-01"], ""),
        ([f"00-{'a' * 32}-{'0' * 16}-01"], ""),
        (["00" + TRACE.upper()], ""),
        (["00" + TRACE, "00" + TRACE], ""),
        ([], ""),
    ],
)
async def test_a_call_follows_the_trace_that_it_names(named: list[str], followed: str) -> None:
    """Also one that a later version of the header names; its states are one list."""
    spans: Any = FakeSpans()
    headers = [(b"traceparent", each.encode()) for each in named]
    states = [(b"tracestate", b"a=1,b=2"), (b"accept", b"*/*"), (b"tracestate", b"c=3")]
    await ask("/v1/completions", *headers, *states, recorder=Recorder(0, 1, spans=spans))
    assert spans.made[0].began == ("text_completion", followed, "a=1,b=2,c=3")
