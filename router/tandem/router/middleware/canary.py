"""Lets the operator's canary choose its way through the fleet, and tells it which one it took.

The token is read from its file at each use: it may be replaced while the router runs. A request
with a wrong token is refused, so that nobody takes an ordinary answer for a canary's.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.protocol.context import Route, Shape
from tandem.protocol.names import (
    HEADER_CANARY,
    HEADER_DECODE_REVISION,
    HEADER_PREFILL_REVISION,
    HEADER_SHAPE,
)
from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import ErrorAnswer, not_authorized


class Canary:
    """Without a token file every canary is refused."""

    def __init__(self, app: ASGIApp, token_file: str | None) -> None:
        self._app = app
        self._token_file = Path(token_file) if token_file else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        token = headers.get(HEADER_CANARY)
        if token is None:
            await self._app(scope, receive, send)
            return
        if not self._is_right(token):
            await send_error(scope, send, not_authorized())
            return
        shape = headers.get(HEADER_SHAPE)
        if shape is not None and shape not in list(Shape):
            await send_error(scope, send, _unknown_shape(shape))
            return
        route = Route(
            shape=Shape(shape) if shape else None,
            prefill_revision=headers.get(HEADER_PREFILL_REVISION),
            decode_revision=headers.get(HEADER_DECODE_REVISION),
        )
        scope.setdefault("state", {})["route"] = route
        await self._app(scope, receive, _telling(route, send))

    def _is_right(self, token: str) -> bool:
        try:
            known = self._token_file.read_text().strip() if self._token_file else ""
        except OSError:
            return False
        return bool(known) and hmac.compare_digest(token.encode(), known.encode())


def _telling(route: Route, send: Send) -> Send:
    async def told(message: Message) -> None:
        if message["type"] == "http.response.start" and route.served_shape is not None:
            said = {
                HEADER_SHAPE: route.served_shape.value,
                HEADER_PREFILL_REVISION: route.served_prefill,
                HEADER_DECODE_REVISION: route.served_decode,
            }
            more = [(name.lower().encode(), value.encode()) for name, value in said.items()]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return told


def _unknown_shape(shape: str) -> ErrorAnswer:
    allowed = " or ".join(Shape)
    return ErrorAnswer(
        status=400,
        message=f"{HEADER_SHAPE}: {shape!r} is not allowed; {allowed}",
        type="invalid_request_error",
        param=HEADER_SHAPE,
    )
