"""A service that is full: its canary waits as others do, and that is no wrong answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from tests.operator.situations import serving
from tests.operator.test_judging import question, verdict

from tandem.operator.api.status import Condition, ConditionType, LLMServiceStatus, Reason
from tandem.operator.decide.status import next_status
from tandem.operator.probes import canary
from tandem.operator.probes.canary import ask
from tandem.operator.probes.probing import queued

BUSY = {"workers": [{"generated_tokens_per_s": None}, {"generated_tokens_per_s": 41.5}]}
IDLE = {"workers": [{"prompt_tokens_per_s": 0.0, "generated_tokens_per_s": None}]}
LATE = 0


@contextmanager
def router(status: int, body: Any, fleet: Any) -> Iterator[int]:
    """A router that answers questions so, or not in time (``LATE``), and has this fleet."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if status == LATE:
                over.wait(30.0)
            else:
                self.answer(status, body)

        def do_GET(self) -> None:
            self.answer(200, fleet)

        def answer(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving_thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving_thread.start()
        try:
            yield server.server_port
        finally:
            over.set()
            server.shutdown()
            serving_thread.join()


def error(code: str) -> dict[str, Any]:
    """The body of an error, as OpenAI has it."""
    return {"error": {"message": "no room", "type": "x", "code": code}}


@pytest.mark.parametrize(
    ("status", "body", "fleet", "reason"),
    [
        (429, error("rate_limit_exceeded"), IDLE, Reason.CANARY_QUEUED),
        (429, "no JSON object", IDLE, Reason.CANARY_QUEUED),
        (503, error("overloaded"), IDLE, Reason.CANARY_QUEUED),
        (503, error("capacity"), IDLE, Reason.CANARY_QUEUED),
        (504, error("timeout"), BUSY, Reason.CANARY_QUEUED),
        (LATE, None, BUSY, Reason.CANARY_QUEUED),
        (503, error("no_worker"), BUSY, Reason.CANARY_FAILED),
        (503, "no JSON object", BUSY, Reason.CANARY_FAILED),
        (500, error("internal"), BUSY, Reason.CANARY_FAILED),
        (504, error("timeout"), IDLE, Reason.CANARY_FAILED),
        (LATE, None, IDLE, Reason.CANARY_FAILED),
        (LATE, None, "no fleet", Reason.CANARY_FAILED),
    ],
)
def test_a_canary_without_a_turn_is_not_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch, status: int, body: Any, fleet: Any, reason: Reason
):
    """What a full router says, and what comes too late while others are served, shows nothing."""
    monkeypatch.setattr(canary, "TIMEOUT", 0.5)
    with router(status, body, fleet) as port:
        assert ask(question(port, "r"), 0.0).reason is reason


def test_the_last_answer_holds_while_the_canary_waits():
    """It is said that the last question had no turn, once."""
    good = verdict("r", Reason.CANARY_OK, "all well")
    late = msgspec.structs.replace(good, ok=False, reason=Reason.CANARY_QUEUED, message="HTTP 429")
    once = queued(good, late)
    assert (once.ok, once.reason) == (True, good.reason)
    assert once.message == f"{good.message}; the last question waited in the queue: HTTP 429"
    assert queued(once, late) == once


def test_a_service_that_served_before_stays_servable_for_another_leader():
    """It has asked nobody yet, and its first question waits."""
    before = Condition(
        type=ConditionType.SERVABLE,
        status="True",
        reason=Reason.CANARY_OK,
        message="all well",
        last_transition_time="2026-01-01T00:00:00Z",
        observed_generation=1,
    )
    full = verdict("r", Reason.CANARY_QUEUED, "HTTP 429")
    seen = msgspec.structs.replace(serving(), canary=full)
    told = next_status(seen, LLMServiceStatus(conditions=[before]))
    words = {each.type: (each.status, each.reason) for each in told.conditions}
    assert words[ConditionType.SERVABLE] == ("True", Reason.CANARY_OK)
    assert words[ConditionType.READY][0] == "True"
    assert words[ConditionType.DEGRADED][0] == "False"
