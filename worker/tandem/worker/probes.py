"""HTTP of a worker for the kubelet and Prometheus: /health, /ready, /metrics, /debug.

Threads of the standard library's server answer while the step loop is busy.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from tandem.base.listening import child_headers, family_of, listening_host, take_both_families

MAX_CONNECTIONS = 64
"""Connections at a time, each with a thread; a further one replaces the oldest."""
POLL_SECONDS = 1.0
"""Interval at which the server checks for its end."""


@dataclass(frozen=True, slots=True)
class ProbeState:
    """Callbacks of the probes, which answer without waiting for the step loop."""

    health: Callable[[], str | None]
    """Function that returns None while the worker is alive, else the reason."""
    ready: Callable[[], str | None]
    """Function that returns None while requests may come, else the reason."""
    debug: Callable[[], dict[str, object]]
    registry: CollectorRegistry


class ProbeServer:
    """HTTP server, bound at once so that a taken port is an error at start."""

    def __init__(self, host: str, port: int, state: ProbeState) -> None:
        handler = type("Handler", (_Handler,), {"state": state})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": POLL_SECONDS}, daemon=True
        )
        self._thread.name = "tandem-probes"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, within ``POLL_SECONDS``."""
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[object, None] = {}
        self._lock = threading.Lock()
        host = listening_host(address[0])
        self.address_family = family_of(host)
        super().__init__((host, address[1]), handler)

    def server_bind(self) -> None:
        take_both_families(self.socket)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
        if oldest is not None:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)


def _hang_up(connection: Any) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    state: ProbeState
    timeout = 5

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, generate_latest(self.state.registry), CONTENT_TYPE_LATEST)
        elif path in ("/health", "/ready"):
            problem = self.state.health() if path == "/health" else self.state.ready()
            self._json(200 if problem is None else 503, {"status": problem or "ok"})
        elif path == "/debug":
            self._json(200, self.state.debug())
        else:
            self._json(404, {"status": "not found", "paths": "/health /ready /metrics /debug"})

    def _json(self, status: int, body: dict[str, object]) -> None:
        self._answer(status, json.dumps(body).encode() + b"\n", "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        with suppress(ConnectionError):  # the client closed before a late answer
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in child_headers().items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name it overrides
        """Drop the log line: probes come every few seconds."""
