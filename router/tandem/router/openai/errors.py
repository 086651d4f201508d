"""OpenAI's error body, and the status of each exception in it.

InvalidParameter, ContextLengthExceeded      400, with the field
RequestRefused   invalid, never_fits, …      400
                 capacity, draining, …       503, with Retry-After
AdmissionRefused queue full                  429; waited too long 503; with Retry-After
RequestFailed    deadline                    504
                 failed closed, internal     500
                 every other                 503, with Retry-After
HttpProblem      its own status              404, 401, 413, …
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.protocol.errors import (
    DeadlinePassed,
    InvalidParameter,
    RefusalCode,
    RequestFailed,
    RequestRefused,
    TandemError,
)
from tandem.router.admission.queue import AdmissionRefused, RejectReason
from tandem.router.dispatch.failure import FailedClosed
from tandem.router.openai.client_words import param_of, words_of_failure, words_of_refusal
from tandem.router.openai.written import MAX_NAME, shortened, written
from tandem.text.errors import ContextLengthExceeded

RETRY_AFTER = 2
"""Seconds: a worker is back or found in about this time."""

_BAD_REQUEST = frozenset({RefusalCode.INVALID, RefusalCode.NEVER_FITS, RefusalCode.UNSUPPORTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """Status and body of an error."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def body(self) -> bytes:
        """Return the error as JSON."""
        return msgspec.json.encode(self.content)


class HttpProblem(TandemError):
    """A request that is answered with a status of its own."""

    def __init__(self, answer: ErrorAnswer) -> None:
        self.answer = answer
        super().__init__(answer.message)


def unknown_model(name: str) -> HttpProblem:
    """Return the answer 404 for a model that is not served here."""
    return HttpProblem(
        ErrorAnswer(
            status=404,
            message=f"The model `{name[:256]}` does not exist",
            type="invalid_request_error",
            param="model",
            code="model_not_found",
        )
    )


def body_too_large(limit: int) -> ErrorAnswer:
    """Return the answer 413."""
    return ErrorAnswer(
        status=413,
        message=f"The body is larger than {limit} bytes",
        type="invalid_request_error",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def body_too_slow(seconds: float) -> ErrorAnswer:
    """Return the answer 408."""
    return ErrorAnswer(
        status=408,
        message=f"The body did not come within {seconds:g} s",
        type="invalid_request_error",
        code="request_timeout",
        headers={"Connection": "close"},
    )


def not_authorized() -> ErrorAnswer:
    """Return the answer 401."""
    return ErrorAnswer(
        status=401,
        message="No or wrong API key: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        type="invalid_request_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def no_administration() -> ErrorAnswer:
    """Return the answer 403."""
    return ErrorAnswer(
        status=403,
        message="Administration is off: start the server with --admin-api-key or "
        "--admin-api-keys-dir, or, if it has no keys at all, with --enable-admin-api",
        type="invalid_request_error",
        code="no_admin_key",
    )


def answer_of(error: Exception) -> ErrorAnswer:
    """Return the error answer for an exception."""
    if isinstance(error, HttpProblem):
        return error.answer
    if isinstance(error, InvalidParameter):
        code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else None
        param = shortened(error.param, MAX_NAME)
        message = f"{param}: {written(error.value)} is not allowed; {error.allowed}"
        return bad_request(message, param, code)
    if isinstance(error, AdmissionRefused):
        return _overloaded(error)
    if isinstance(error, RequestRefused):
        return _refused(error)
    if isinstance(error, RequestFailed):
        return _failed(error)
    return ErrorAnswer(status=500, message="Internal error of the router", type="server_error")


def bad_request(message: str, param: str | None, code: str | None = None) -> ErrorAnswer:
    """Return the answer 400."""
    return ErrorAnswer(
        status=400, message=message, type="invalid_request_error", param=param, code=code
    )


def _overloaded(error: AdmissionRefused) -> ErrorAnswer:
    aged = error.reason is RejectReason.AGE
    return ErrorAnswer(
        status=503 if aged else 429,
        message=str(error),
        type="server_error" if aged else "rate_limit_error",
        code="overloaded" if aged else "rate_limit_exceeded",
        headers={"Retry-After": str(math.ceil(error.retry_after))},
    )


def _refused(error: RequestRefused) -> ErrorAnswer:
    refusal = error.refusal
    if refusal.code in _BAD_REQUEST:
        return bad_request(words_of_refusal(refusal), param_of(refusal), str(refusal.code))
    return _unavailable(words_of_refusal(refusal), str(refusal.code))


def _failed(error: RequestFailed) -> ErrorAnswer:
    message = words_of_failure(error)
    if isinstance(error, FailedClosed):
        return ErrorAnswer(status=500, message=message, type="server_error", code="failed_closed")
    if isinstance(error, DeadlinePassed):
        return ErrorAnswer(status=504, message=message, type="server_error", code="timeout")
    return _unavailable(message, str(error.cause))


def _unavailable(message: str, code: str) -> ErrorAnswer:
    return ErrorAnswer(
        status=503,
        message=message,
        type="server_error",
        code=code,
        headers={"Retry-After": str(RETRY_AFTER)},
    )
