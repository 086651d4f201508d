"""A line of so many bytes a second between decode workers and a prefill worker's data port.

The prefill worker advertises an address of the loopback at which only this listens; it itself is
as ever. Its control port is passed on as it comes. Bytes of all connections share the rate.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

ADVERTISED = "127.0.0.2"
LISTENED = "127.0.0.1"
PIECE = 64 << 10
LATE_SECONDS = 0.005
"""By which a piece may be late without slowing the line: sleeps are not exact."""
WAIT_SECONDS = 0.2


class SlowLine:
    """In front of one worker's ports, with a thread for each way of a connection."""

    def __init__(self, control: int, data: int, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        """Towards decode workers; may be set at any time."""
        self.passed = 0
        """Bytes of the data port."""
        self._data = data
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._servers = {port: socket.create_server((ADVERTISED, port)) for port in (control, data)}
        for port, server in self._servers.items():
            server.settimeout(WAIT_SECONDS)
            threading.Thread(target=self._accept, args=(port, server), daemon=True).start()

    def close(self) -> None:
        """End every connection, within ``WAIT_SECONDS``."""
        self._over.set()
        for each in self._servers.values():
            each.close()

    def _accept(self, port: int, server: socket.socket) -> None:
        while not self._over.is_set():
            try:
                near, _ = server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                far = socket.create_connection((LISTENED, port), timeout=WAIT_SECONDS)
            except OSError:
                near.close()
                continue
            for each in (near, far):
                each.settimeout(WAIT_SECONDS)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends, paced in (((near, far), False), ((far, near), port == self._data)):
                threading.Thread(target=self._carry, args=(*ends, paced), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, paced: bool) -> None:
        """One way, until either end closes."""
        buffer = memoryview(bytearray(PIECE))
        with suppress(OSError), source, target:
            while not self._over.is_set():
                try:
                    count = source.recv_into(buffer)
                except TimeoutError:
                    continue
                if not count:
                    break
                if paced:
                    self._pace(count)
                self._send(target, buffer[:count])
            for each in (source, target):
                each.shutdown(socket.SHUT_RDWR)

    def _send(self, target: socket.socket, data: memoryview) -> None:
        while data and not self._over.is_set():
            with suppress(TimeoutError):
                data = data[target.send(data) :]

    def _pace(self, count: int) -> None:
        """Return when the line has brought so many bytes more."""
        with self._lock:
            begins = max(self._free_at, time.monotonic() - LATE_SECONDS)
            self._free_at = ends = begins + count / self.bytes_per_s
            self.passed += count
        time.sleep(max(0.0, ends - time.monotonic()))
