"""Answers that middleware gives by itself, in OpenAI's error shape."""

from __future__ import annotations

from starlette.types import Send

from tandem.router.openai.errors import ErrorAnswer


async def send_error(send: Send, answer: ErrorAnswer) -> None:
    """Send the whole answer."""
    body = answer.body
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **answer.headers,
    }
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
