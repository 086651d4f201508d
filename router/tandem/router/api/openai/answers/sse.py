"""Stream responses, and a watch on the connection: work ends when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
)
from contextlib import aclosing, asynccontextmanager
from itertools import islice
from time import monotonic
from typing import Any, Protocol, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.protocol.errors import TandemError
from tandem.router.api.openai.answers.chunks import DONE, event
from tandem.router.http.errors import ErrorAnswer, answer_of
from tandem.router.observe.timeline.recorder import comment_of
from tandem.tracing.recording import Recording

COMMENT = b": keep-alive\n\n"
"""A line that readers of server-sent events skip."""
AT_ONCE = 32
"""Streams that are checked in one round of the loop."""


class Stream(Protocol):
    """Stream whose headers were sent."""

    def keep_alive(self) -> None:
        """Send a comment if nothing was sent since the last call. Returns at once."""
        ...


class KeepAlives:
    """Calls every stream twice in ``seconds``; never if that is 0."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._streams: dict[Stream, None] = {}
        self._timer: asyncio.Handle | None = None

    @property
    def are_sent(self) -> bool:
        """Return whether streams begin early and send comments."""
        return self._seconds > 0

    def add(self, stream: Stream) -> None:
        if not self.are_sent:
            return
        self._streams[stream] = None
        if self._timer is None:
            self._rest()

    def discard(self, stream: Stream) -> None:
        """Remove a stream, if it was added."""
        self._streams.pop(stream, None)

    def _rest(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / 2, self._begin)

    def _begin(self) -> None:
        self._go_on(iter(list(self._streams)))

    def _go_on(self, left: Iterator[Stream]) -> None:
        some = list(islice(left, AT_ONCE))
        for stream in some:
            if stream in self._streams:
                stream.keep_alive()
        if len(some) == AT_ONCE:
            self._timer = asyncio.get_running_loop().call_soon(self._go_on, left)
        elif self._streams:
            self._rest()
        else:
            self._timer = None


_KEY = "last_words"


def end_with(scope: Scope, words: Callable[[ErrorAnswer], bytes]) -> None:
    """Set the function that returns the last events of a failing stream."""
    scope["state"][_KEY] = words


def last_words(scope: Scope, answer: ErrorAnswer) -> bytes:
    """Return the last events in the request's API, by default OpenAI's."""
    words: Callable[[ErrorAnswer], bytes] | None = scope.get("state", {}).get(_KEY)
    return event(answer.content) + DONE if words is None else words(answer)


logger = logging.getLogger(__name__)


class ClientGone(TandemError):
    """The client has left, so the rest of its answer is not read."""


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects, and raise ClientGone."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="client-watch")
    try:
        yield
    except asyncio.CancelledError as error:
        if gone:
            task.uncancel()
            raise ClientGone("the client left") from error
        raise
    finally:
        watcher.cancel()


class EventStream(Response):
    """Response that sends the bytes of ``events`` as they come.

    Headers are sent with the first event, comments in long pauses. An error before the first event
    is raised; a later one becomes the last events. A client that does not read for ``seconds`` in
    all has left.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        seconds: float,
        gone: Callable[[], None],
        keep_alives: KeepAlives,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._seconds = seconds
        self._gone = gone
        self._keep_alives = keep_alives
        self._send_part: Send | None = None
        self._is_quiet = False
        """Whether nothing was sent since the last ``keep_alive``."""

    def keep_alive(self) -> None:
        """Send a comment if nothing was sent since the last call, and the client reads."""
        if not self._is_quiet or self._send_part is None:
            self._is_quiet = True
            return
        message = {"type": "http.response.body", "body": COMMENT, "more_body": True}
        sending = cast("Coroutine[Any, Any, None]", self._send_part(message))
        try:
            # A server with room writes at once; if it waits, the write is given up.
            sending.send(None)
        except StopIteration:
            pass
        else:
            sending.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application. Raises errors from before the first event."""
        begun = False
        state = scope.get("state", {})
        state["streams"] = True
        recording: Recording | None = state.get("recording")
        asked = recording if state.get("wants_timeline") else None
        async with aclosing(self._events) as events:
            try:
                async with while_connected(receive), asyncio.timeout(None) as patience:
                    first = await anext(events)
                    begun = True
                    patience.reschedule(asyncio.get_running_loop().time() + self._seconds)
                    part = state.get("send_part", send)
                    await self._send_all(first, events, send, part, recording, asked, scope)
            except (ClientGone, TimeoutError):
                if not begun:
                    raise
                self._gone()

    async def _send_all(
        self,
        first: bytes,
        events: AsyncIterator[bytes],
        send: Send,
        send_part: Send,
        recording: Recording | None,
        asked: Recording | None,
        scope: Scope,
    ) -> None:
        """Send all events.

        ``send_part`` is the server's own: middleware sees only the beginning and the end.
        """
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await _send_part(send, first)
        self._send_part = send_part
        self._keep_alives.add(self)
        try:
            async for chunk in events:
                self._is_quiet = False
                if chunk is DONE and asked is not None:
                    await _send_part(send_part, comment_of(asked))
                    asked = None
                # Once per token: constants, no calls.
                message = {"type": "http.response.body", "body": chunk, "more_body": True}
                if recording is None:
                    await send_part(message)
                else:
                    since = monotonic()
                    await send_part(message)
                    recording.write_seconds += monotonic() - since
            if asked is not None:  # a stream with another end
                await _send_part(send_part, comment_of(asked))
        except Exception as error:  # the client receives this error
            answer = answer_of(error)
            if answer.status == 500:
                logger.exception("a stream failed")
            await _send_part(send, last_words(scope, answer))
        finally:
            self._keep_alives.discard(self)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, content: bytes) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": True})
