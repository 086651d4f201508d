"""uvicorn's HTTP protocol, with an answer's headers joined to its first body bytes, and without
chunks for HTTP/1.0.

uvicorn writes headers and body apart. That is one more call into the kernel for every answer. The
client wakes once for the headers and again for the first token of a stream. It also sends chunks to
every client, which RFC 9112, section 6.1, forbids for HTTP/1.0.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.router.http_parser import RequestParser


class JoinedTransport(asyncio.Transport):
    """Transport of one answer's beginning: it holds the headers until more is written, but never
    beyond this turn of the loop (an answer to HEAD has no body).

    ``done`` is called with the inner transport once nothing is held. What follows may be written
    there, which saves a call for every token.
    """

    def __init__(
        self, transport: asyncio.Transport, done: Callable[[asyncio.Transport], None]
    ) -> None:
        super().__init__()
        self._transport = transport
        self._done = done
        self._held: bytes | None = None
        self._begun = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See Transport."""
        if not self._begun:
            self._begun, self._held = True, bytes(data)
            asyncio.get_running_loop().call_soon(self._release)
        elif self._held is not None:
            joined, self._held = self._held + data, None
            self._transport.write(joined)
            self._done(self._transport)
        else:
            self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See Transport."""
        return self._transport.get_extra_info(name, default)

    def close(self) -> None:
        """See Transport."""
        self._release()
        self._transport.close()

    def is_closing(self) -> bool:
        """See Transport."""
        return self._transport.is_closing()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._transport.write(held)
            self._done(self._transport)


class UnchunkedCycle(RequestResponseCycle):
    """Answer to HTTP/1.0. Without a known length it ends with the connection. The connection is
    reset if it closes before that, so that no client takes a part for the whole."""

    is_measured = False

    async def send(self, message: ASGISendEvent) -> None:
        """See RequestResponseCycle."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", [])}
            self.is_measured = b"content-length" in names
            self.chunked_encoding = None if self.is_measured else False
            if not self.is_measured:
                self._reset_at_close(True)
        elif message["type"] == "http.response.body" and not self.is_measured:
            self.expected_content_length = len(message.get("body", b""))
            if not message.get("more_body", False):
                await self.flow.drain()
                self._reset_at_close(False)
        await super().send(message)

    def would_seem_whole(self) -> bool:
        """Return whether the client would take its part for the whole after an orderly close."""
        return self.response_started and not self.response_complete and not self.is_measured

    def _reset_at_close(self, is_reset: bool) -> None:
        raw = self.transport.get_extra_info("socket")
        if raw is not None and not self.transport.is_closing():
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_reset, 0))


class JoinedProtocol(HttpToolsProtocol):
    """Protocol for ``uvicorn.run(http=...)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: RequestParser = RequestParser(self)  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the parser."""
        self.parser.close()
        super().connection_lost(exc)

    def on_head_again(self) -> None:
        """Do nothing: the parts of this head come a second time."""

    def on_headers_complete(self) -> None:
        """Prepare the answer to a request; its task has not run yet."""
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None:
            if self.scope["http_version"] == "1.0":
                cycle.__class__ = UnchunkedCycle
            cycle.transport = JoinedTransport(
                cycle.transport, lambda transport: setattr(cycle, "transport", transport)
            )
