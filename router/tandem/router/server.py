"""uvicorn as the router runs it: guarded connections, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import (
    ASGIApp,
    Receive,
    Scope,
    Send,
)
from uvicorn.server import ServerState

from tandem.base.listening import ANY_6, bound_socket
from tandem.link.sockets import raise_descriptor_limit
from tandem.router.api.stopping import LAST_WORD_SECONDS, Ending, shutting_down
from tandem.router.config import RouterConfig
from tandem.router.http.closing import LINGER_BYTES, LINGER_SECONDS
from tandem.router.http.guard import guarded
from tandem.router.http.middleware import send_error
from tandem.router.http.protocol import ConnectionLimits

SECONDS = 1.0
"""Interval of checks for a quiet moment, in seconds."""
YOUNGEST, YOUNGER = 700, 2
"""Thresholds of the first two generations."""
NEVER = 2**31 - 1
WORTH = 10
"""Passes over younger generations after which a full pass waits for a quiet moment."""
MOST = 2_000
"""Passes after which a full pass is made even under load."""


@asynccontextmanager
async def paced(is_quiet: Callable[[], bool]) -> AsyncIterator[None]:
    """Make full passes of garbage collection until the block ends.

    They run when ``is_quiet``, or after too many objects. Initial objects are frozen.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNGEST, YOUNGER, NEVER)
    watching = asyncio.create_task(_watch(is_quiet), name="full-passes")
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        gc.set_threshold(*before)


async def _watch(is_quiet: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(SECONDS)
        if is_due(gc.get_count()[2], quiet=is_quiet()):
            gc.collect()


def is_due(passes: int, *, quiet: bool) -> bool:
    """Return whether a full pass is due after ``passes`` over younger generations."""
    return passes >= MOST or (quiet and passes >= WORTH)


EVERY = 0.1
"""Interval of checks while the router shuts down, in seconds."""
DESCRIPTORS_KEPT = 512
"""Descriptors that are not for clients' connections."""
BODY_GRACE = 5.0
"""Seconds beyond an endpoint's limit or the answer after which a slow body is cut."""


ANSWERED_TO_THE_END = frozenset({"/health", "/live", "/ping", "/metrics"})
_STOPS = shutting_down("The server stops; try again")


class RpcServer(Protocol):
    """gRPC server next to HTTP."""

    async def stop(self, grace: float) -> None:
        """Accept no more calls, and end running ones after ``grace`` seconds."""


class Server(uvicorn.Server):
    """Server whose running answers get ``drain_seconds`` after a signal, then an error.

    Meanwhile new requests get an error; metrics are still served. A second signal ends the process
    at once.
    """

    def __init__(self, config: uvicorn.Config, *, app: Any, drain_seconds: float) -> None:
        config.timeout_graceful_shutdown = math.ceil(
            drain_seconds + 2 * LAST_WORD_SECONDS + 2 * LINGER_SECONDS
        )
        super().__init__(config)
        self._app = app
        self._ending: Ending = app.state.ending
        self._drain_seconds = drain_seconds
        self._late = ServerState()
        """Connections made after the signal."""
        self._late_servers: list[asyncio.Server] = []
        self._rpc: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, on `::` for both families."""
        config, own = self.config, sockets is None and self.config.host.strip("[]") == ANY_6
        if own:
            with suppress(OSError):  # the second attempt reports it
                sockets = [bound_socket(config.host, config.port)]
        await super().startup(sockets)
        if own and sockets is not None:
            self._log_started_message(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        end = loop.call_later(self._drain_seconds, self._ending.stop)
        rpc: RpcServer | None = self._app.state.rpc
        if rpc is not None:
            self._rpc = loop.create_task(rpc.stop(self._drain_seconds))
        await self._listen_on(loop)
        try:
            await super().shutdown(sockets)
            await self._end_rpc()
            await self._leave()
        finally:
            end.cancel()

    async def _end_rpc(self) -> None:
        """Wait for gRPC's end, but not beyond a second signal."""
        if self._rpc is None:
            return
        while not self._rpc.done() and not self.force_exit:
            await asyncio.wait((self._rpc,), timeout=EVERY)
        if self.force_exit:
            self._rpc.cancel()
        else:
            await self._rpc

    async def _leave(self) -> None:
        """Let late connections read their answers, then abort the rest."""
        await asyncio.sleep(0)  # for those that are being accepted
        for _ in range(math.ceil(2 * LINGER_SECONDS / EVERY)):
            if self.force_exit or not self._late.connections:
                break
            await asyncio.sleep(EVERY)
        for connection in (*self._late.connections, *self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def _listen_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the listening sockets over from servers that are about to close."""
        config = copy.copy(self.config)
        config.loaded_app = Draining(self.config.loaded_app)

        def connected() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self._late, app_state=self.lifespan.state
            )
            return made

        for listening in [each for server in self.servers for each in server.sockets]:
            same = socket.socket(fileno=os.dup(listening.fileno()))
            server = await loop.create_server(
                connected, sock=same, ssl=config.ssl, backlog=config.backlog
            )
            self._late_servers.append(server)

    async def _wait_tasks_to_complete(self) -> None:
        try:
            await super()._wait_tasks_to_complete()
            await self._end_rpc()
        finally:
            for server in self._late_servers:
                server.close()
            for connection in list(self._late.connections):
                connection.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)


class Draining:
    """Application of a router that shuts down: 503 except for liveness and metrics.

    ASGI middleware around the whole app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ANSWERED_TO_THE_END:
            await self._app(scope, receive, send)
            return
        while (await receive()).get("more_body", False):
            pass  # a connection closed with unread bytes would lose the answer
        await send_error(scope, send, _STOPS)


def make_server(app: Any, config: RouterConfig, **options: Any) -> Server:
    """Return a server of the app; ``options`` are uvicorn's."""
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        loop="uvloop",
        http=guarded(limits_of(config)),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        reset_contextvars=True,  # a request's tenant is not that of the next one
        timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # any seconds
        **options,
    )
    return Server(settings, app=app, drain_seconds=config.drain_timeout)


def limits_of(config: RouterConfig) -> ConnectionLimits:
    """Return the configured limits, within this process's descriptors."""
    return ConnectionLimits(
        head_bytes=config.max_header_bytes,
        headers=config.max_headers,
        head_seconds=config.header_timeout,
        body_seconds=config.body_timeout + BODY_GRACE,
        unwanted_seconds=BODY_GRACE,
        unwanted_bytes=2 * config.max_body_bytes + LINGER_BYTES,
        write_seconds=config.write_timeout,
        connections=min(config.max_connections, raise_descriptor_limit() - DESCRIPTORS_KEPT),
        connections_per_client=config.max_connections_per_client,
    )
