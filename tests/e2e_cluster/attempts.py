"""Connections of a load, one record each: what was reached on it, and when.

An httpx transport notes what httpcore tells of each request: which local port it had, whether it
was connected, sent, and whether its answer had begun. It also sees to it that a peer that fell
silent is noticed: without keepalive a client waits for as long as it waits for an answer.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

import httpx

KEEP_IDLE, KEEP_EVERY, KEEP_TRIES = 2, 1, 5
SILENT_SECONDS = KEEP_IDLE + KEEP_EVERY * KEEP_TRIES
"""A connection whose peer says nothing, not even to keepalives, is over after this."""


Ends = tuple[str, int, str, int]
"""A TCP connection as its client sees it: its own address and port, and those it asked for."""


@dataclass
class Attempt:
    """One request on one connection; moments are of ``time.monotonic``."""

    began: float
    ends: Ends | None = None
    """Once connected."""
    connected: float | None = None
    sent: float | None = None
    """The whole request was written."""
    answered: float | None = None
    """The first bytes of the answer came."""
    ended: float | None = None
    problem: str = ""
    """How it broke; empty when it did not."""

    def broke(self, problem: str) -> None:
        """It is over, and no answer came of it."""
        self.ended, self.problem = time.monotonic(), problem

    def state(self, moment: float) -> str:
        for reached, name in (
            (self.ended, "ended"),
            (self.answered, "answer begun"),
            (self.sent, "asked, no answer yet"),
            (self.connected, "connected, not asked yet"),
            (self.began, "connecting"),
        ):
            if reached is not None and reached <= moment:
                return name
        return "not begun"


class Recording(httpx.AsyncHTTPTransport):
    """Leaves an ``Attempt`` for each request in ``attempts``."""

    def __init__(self, attempts: list[Attempt]) -> None:
        super().__init__(
            limits=httpx.Limits(max_keepalive_connections=0),  # each request meets some router anew
            socket_options=[
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_IDLE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_EVERY),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_TRIES),
                (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS),
            ],
        )
        self._attempts = attempts
        self.latest = Attempt(0.0)
        """Of the request that was sent last: there is one at a time."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it, and note how far it comes."""
        self.latest = attempt = Attempt(time.monotonic())
        self._attempts.append(attempt)
        request.extensions = {**request.extensions, "trace": _tracer(attempt)}
        return await super().handle_async_request(request)


def _tracer(attempt: Attempt) -> Any:
    async def note(event: str, info: dict[str, Any]) -> None:
        now = time.monotonic()
        match event:
            case "connection.connect_tcp.complete":
                stream = info["return_value"]
                ours, theirs = (
                    stream.get_extra_info(each) for each in ("client_addr", "server_addr")
                )
                attempt.ends = (*ours[:2], *theirs[:2])
                attempt.connected = now
            case "http11.send_request_body.complete":
                attempt.sent = now
            case "http11.receive_response_headers.complete":
                attempt.answered = now

    return note
