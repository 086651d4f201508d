"""Errors in the shape of the API that a request is of: Anthropic's on its paths, else OpenAI's."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Scope

from tandem.router.openai.errors import ErrorAnswer

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
    """Return the request's id; "" if a connection is refused before any layer sees it."""
    return str(scope.get("state", {}).get("request_id", ""))


def error_object(answer: ErrorAnswer, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error object."""
    other = "invalid_request_error" if answer.status < 500 else "api_error"
    error = {"type": _TYPES.get(answer.status, other), "message": answer.message}
    return {"type": "error", "error": error, "request_id": request_id}
