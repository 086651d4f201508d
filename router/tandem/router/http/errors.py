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

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from starlette.types import Scope

from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    InvalidParameter,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
    TandemError,
)
from tandem.router.dispatch.admission import AdmissionRefused
from tandem.router.dispatch.retry_policy import FailedClosed, ReaderTooSlow
from tandem.router.metrics import RejectReason
from tandem.text.errors import ContextLengthExceeded

_AGAIN = "no worker accepted the request; retry"
_REFUSED = {
    RefusalCode.CAPACITY: "the server is at capacity; retry",
    RefusalCode.DRAINING: "server is shutting down; retry",
    RefusalCode.ASLEEP: "the server is asleep; it answers after an administrator wakes it up",
    RefusalCode.EXPIRED: "the deadline passed before the request was scheduled",
}
_FAILED = {
    FailCause.CAPACITY: "the server is at capacity; retry",
    FailCause.DRAINING: "server is shutting down; retry",
    FailCause.ASLEEP: "the server went to sleep; retry after it is woken up",
    FailCause.INTERNAL: "internal error of a worker; retry",
    FailCause.TIMEOUT: "no worker answered in time; retry",
    FailCause.WORKER_LOST: "no worker can finish the request; retry",
}
_PARAMS = {"prompt_token_ids": "prompt"}


def words_of_refusal(refusal: Refusal) -> str:
    """Return the message of a refusal, for HTTP's 400 and 503."""
    if refusal.code is RefusalCode.INVALID:
        return refusal.message  # the request's own fields and values
    if refusal.code is RefusalCode.NEVER_FITS:
        return "prompt and output exceed the KV memory of this server"
    if refusal.code is RefusalCode.UNSUPPORTED:
        return f"{param_of(refusal) or 'the request'}: not available on this server"
    return _REFUSED.get(refusal.code, _AGAIN)


def param_of(refusal: Refusal) -> str | None:
    """Return the client's name of the field that the refusal names."""
    if refusal.param is None:
        return "prompt" if refusal.code is RefusalCode.NEVER_FITS else None
    return _PARAMS.get(refusal.param, refusal.param)


def words_of_failure(error: RequestFailed) -> str:
    """Return the message of a failure, for HTTP's 500, 503 and 504."""
    if isinstance(error, FailedClosed):
        return "two workers returned different tokens; the request ends (failed closed)"
    if isinstance(error, DeadlinePassed | ReaderTooSlow):
        return str(error)
    return _FAILED.get(error.cause, "no worker could finish the request; retry")


MAX_SHOWN = 120
"""Maximum characters of a value."""
MAX_NAME = 128
"""Maximum characters of a field's name, which may be a client's key."""
_MAX_ITEMS = 12
_MAX_DEPTH = 4
_MAX_BITS = 1024
"""Maximum bits of an integer: larger ones are slow to print."""


def shortened(text: str, length: int) -> str:
    """Return the text, cut to ``length`` with three dots."""
    return text if len(text) <= length else text[: length - 3] + "..."


def written(value: object) -> str:
    """Return the value in JSON, cut with three dots."""
    text = shortened(_write(value, _MAX_DEPTH), MAX_SHOWN)
    return text.encode(errors="replace").decode()


def _write(value: object, depth: int) -> str:
    if isinstance(value, str):
        return json.dumps(value[: MAX_SHOWN + 1], ensure_ascii=False)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a number of more than 300 digits"
    if isinstance(value, Mapping):
        inner = [f"{_write(str(k), 0)}: {_write(v, depth - 1)}" for k, v in _some(value, depth)]
        return "{" + ", ".join([*inner, *_more(value, inner)]) + "}"
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes):
        inner = [_write(each, depth - 1) for each in islice(value, _MAX_ITEMS if depth > 0 else 0)]
        return "[" + ", ".join([*inner, *_more(value, inner)]) + "]"
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return shortened(repr(value), MAX_SHOWN)


def _some(value: Mapping[object, object], depth: int) -> list[tuple[object, object]]:
    return list(islice(value.items(), _MAX_ITEMS if depth > 0 else 0))


def _more(
    value: Mapping[object, object] | Sequence[object] | Set[object], some: list[str]
) -> list[str]:
    return ["..."] if len(value) > len(some) else []


RETRY_AFTER = 2
"""Seconds in which a worker usually comes back."""

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
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.content)


class HttpProblem(TandemError):
    """The request is answered with a certain status."""

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
        message=f"The body was not received within {seconds:g} s",
        type="invalid_request_error",
        code="request_timeout",
        headers={"Connection": "close"},
    )


def not_authorized() -> ErrorAnswer:
    """Return the answer 401."""
    return ErrorAnswer(
        status=401,
        message="Missing or wrong API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
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


PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types by status; other client errors are invalid requests, other server errors api_error."""


def error_body(scope: Scope, answer: ErrorAnswer) -> bytes:
    """Return the error as JSON."""
    path: str = scope.get("path", "")
    if path == PATH or path.startswith(f"{PATH}/"):
        return msgspec.json.encode(error_object(answer, _request_id(scope)))
    return answer.body


def _request_id(scope: Scope) -> str:
    return str(scope.get("state", {}).get("request_id", ""))


def error_object(answer: ErrorAnswer, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error object."""
    other = "invalid_request_error" if answer.status < 500 else "api_error"
    error = {"type": _TYPES.get(answer.status, other), "message": answer.message}
    return {"type": "error", "error": error, "request_id": request_id}
