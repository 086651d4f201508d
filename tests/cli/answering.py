"""A server of one handler, in a thread, for who asks over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tandem.cli.serve.listening import LOOPBACK


class Answer(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Not at all."""


@contextmanager
def served(handler: type[Answer]) -> Iterator[str]:
    """Until the block ends; its URL, without a path."""
    with ThreadingHTTPServer((LOOPBACK, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
