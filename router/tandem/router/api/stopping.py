"""Errors for clients whose answer is ended early, by a shutdown or an administrator.

A stream ends with the last events of its API; a request without an answer gets 503. Tasks are
cancelled, and their work on workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.api.openai.answers.sse import last_words
from tandem.router.http.errors import ErrorAnswer
from tandem.router.http.middleware import send_error

LAST_WORD_SECONDS = 1.0
"""Seconds for a client to read its last event."""


class Ending:
    """Running answers of an app."""

    def __init__(self) -> None:
        self._answering: dict[asyncio.Task[object], Scope] = {}
        self._errors: dict[asyncio.Task[object], ErrorAnswer] = {}

    def stop(self) -> None:
        """End every answer. In the loop's thread."""
        for task in list(self._answering):
            self._end(task, _STOPS)

    def abort(self, request_ids: Collection[str]) -> int:
        """End the answers of these ids, of clients or answers; return their number."""
        wanted = [task for task, scope in self._answering.items() if _is_of(scope, request_ids)]
        for task in wanted:
            self._end(task, _ABORTED)
        return len(wanted)

    def begin(self, scope: Scope) -> asyncio.Task[object]:
        """Register the current task as an answer."""
        task = asyncio.current_task()
        assert task is not None
        self._answering[task] = scope
        return task

    def end(self, task: asyncio.Task[object]) -> None:
        self._answering.pop(task, None)
        self._errors.pop(task, None)

    def error_of(self, task: asyncio.Task[object]) -> ErrorAnswer | None:
        """Return the error of a task that was cancelled here, else None."""
        return self._errors.get(task)

    def _end(self, task: asyncio.Task[object], answer: ErrorAnswer) -> None:
        self._errors.setdefault(task, answer)
        task.cancel()


def _is_of(scope: Scope, request_ids: Collection[str]) -> bool:
    state = scope["state"]
    return state["request_id"] in request_ids or state.get("answer_id") in request_ids


class Stopping:
    """ASGI middleware around all answers."""

    def __init__(self, app: ASGIApp, ending: Ending) -> None:
        self._app = app
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        task, answer = self._ending.begin(scope), _Answer(scope, send)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            error = self._ending.error_of(task)
            if error is None:
                raise
            task.uncancel()
            await answer.end(error)
        finally:
            self._ending.end(task)


class _Answer:
    """Progress of one answer."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._begun = self._is_stream = self._ended = False

    async def send(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._begun = True
            kind: bytes = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        elif not message.get("more_body", False):
            self._ended = True

    async def end(self, error: ErrorAnswer) -> None:
        """Send the last event, if the client reads it soon."""
        try:
            async with asyncio.timeout(LAST_WORD_SECONDS):
                if not self._begun:
                    await send_error(self._scope, self._send, error)
                elif self._is_stream and not self._ended:
                    body = last_words(self._scope, error)
                    last = {"type": "http.response.body", "body": body, "more_body": False}
                    await self._send(last)
        except TimeoutError:
            pass  # the answer cannot end properly


def shutting_down(message: str) -> ErrorAnswer:
    """Return the answer of a router that shuts down."""
    headers = {"Retry-After": "2", "Connection": "close"}
    return ErrorAnswer(
        status=503, message=message, type="server_error", code="shutting_down", headers=headers
    )


_STOPS = shutting_down("The server stops before the answer is finished; try again")
_ABORTED = ErrorAnswer(
    status=400,
    message="The request was aborted by an administrator",
    type="invalid_request_error",
    code="aborted",
)
"""A status that clients do not retry."""
