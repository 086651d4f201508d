"""/livez, /readyz and /metrics of the operator: a thread of the standard library's server.

Alive means: the last periodic list is fresh, while leading; so a hung watch or client restarts the
pod. A standby is alive while its election thread is. Called by ``run``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from prometheus_client import CONTENT_TYPE_LATEST

from tandem.operator.metrics import OperatorMetrics
from tandem.protocol.listening import ANY_6, family_of, listening_host, take_both_families

Check = Callable[[], str | None]
"""None while all is well, else what is wrong."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        host = listening_host(ANY_6)
        self.address_family = family_of(host)
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without asking the DNS for this machine's name, which may take its time."""
        take_both_families(self.socket)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]


class Server:
    """Binds at once, so that a taken port is an error at the start; serves from ``start`` on."""

    def __init__(self, port: int, metrics: OperatorMetrics, alive: Check, ready: Check) -> None:
        checks = {"/livez": alive, "/readyz": ready}
        handler = type("Handler", (_Handler,), {"checks": checks, "metrics": metrics})
        try:
            self._server = _Listener(port, handler)
        except OSError as error:
            raise OSError(f"cannot listen on port {port}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="probes", daemon=True
        )

    @property
    def port(self) -> int:
        """Return the bound port."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    checks: dict[str, Check]
    metrics: OperatorMetrics
    timeout = 5

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, self.metrics.text(), CONTENT_TYPE_LATEST)
        elif path in self.checks:
            problem = self.checks[path]()
            self._answer(200 if problem is None else 503, f"{problem or 'ok'}\n".encode())
        else:
            self._answer(404, b"/livez /readyz /metrics\n")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name it overrides
        """Drop the log line: probes come every few seconds."""
