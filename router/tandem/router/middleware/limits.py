"""Refuses bodies above the limit before, or while, they are read; and all of them together."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import ErrorAnswer, HttpProblem, body_too_large


class BodyLimit:
    """A declared length is refused at once, an undeclared one when it has grown too large.

    A body counts among all until its answer begins: by then it was understood and let go of.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_bodies_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes
        self._limit_of_all = max_bodies_bytes
        self._held = 0
        """Bytes of all bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._limit:
            await send_error(scope, send, body_too_large(self._limit))
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            come = len(message.get("body", b""))
            num_bytes += come
            self._held += come
            if num_bytes > self._limit:
                raise HttpProblem(body_too_large(self._limit))
            if self._held > self._limit_of_all and num_bytes < self._held:
                raise HttpProblem(_too_many_bodies())
            return message

        def let_go() -> None:
            nonlocal num_bytes
            self._held -= num_bytes
            num_bytes = 0

        async def answering(message: Message) -> None:
            let_go()
            await send(message)

        try:
            await self._app(scope, counted, answering)
        finally:
            let_go()


def _too_many_bodies() -> ErrorAnswer:
    return ErrorAnswer(
        status=503,
        message="The router is full: too many large requests at once",
        type="server_error",
        code="overloaded",
        headers={"Retry-After": "2", "Connection": "close"},
    )
