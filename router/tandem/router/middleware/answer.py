"""Answers that middleware gives by itself, in the error shape of the request's API."""

from __future__ import annotations

from starlette.types import Scope, Send

from tandem.router.anthropic.errors import error_body
from tandem.router.openai.errors import ErrorAnswer


async def send_error(scope: Scope, send: Send, answer: ErrorAnswer) -> None:
    """Send the whole answer."""
    body = error_body(scope, answer)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **answer.headers,
    }
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
