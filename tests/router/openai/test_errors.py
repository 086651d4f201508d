"""From an exception to the status and the body that a client sees."""

from __future__ import annotations

import json

import pytest

from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.router.dispatch.retry_policy import FailedClosed
from tandem.router.http.errors import answer_of


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DeadlinePassed(FailCause.TIMEOUT, "m"), 504, "timeout"),
        (FailedClosed(FailCause.IDENTITY, "m"), 500, "failed_closed"),
        (RequestFailed(FailCause.TIMEOUT, "m"), 503, "timeout"),
        (RequestFailed(FailCause.IDENTITY, "m"), 503, "identity"),
        (RequestFailed(FailCause.INTERNAL, "m", ("a", "b")), 503, "internal"),
        (
            RequestRefused(Refusal(code=RefusalCode.DUPLICATE, message="m")),
            503,
            "duplicate",
        ),
        (ValueError("secret"), 500, None),
    ],
)
def test_error_answers(error: Exception, status: int, code: str | None) -> None:
    """Statuses and codes; what happened within the fleet is for the log."""
    answer = answer_of(error)
    body = json.loads(answer.body)["error"]

    assert (answer.status, body["code"]) == (status, code)
    assert "secret" not in body["message"]
    if isinstance(error, RequestFailed) and error.reasons:
        assert "a; b" not in body["message"]
    assert ("Retry-After" in answer.headers) == (status == 503)
