"""Between an operator and the API server: plain HTTP in, TLS out; swallows watches, cuts all, or
hangs."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import threading
import time
from pathlib import Path

from tests.operator.control_plane import ControlPlane


class Proxy:
    """With ``swallow`` the streams of watches stay open and silent; ``cut`` ends everything;
    ``hang`` takes requests and never finishes an answer."""

    def __init__(self, plane: ControlPlane, *, swallow: bool = False) -> None:
        self._plane = plane
        self._swallow = swallow
        self._blocked = False
        self._hangs = threading.Event()
        self.swallowed = 0
        """Bytes of watches that nobody got."""
        self.requests: list[str] = []
        """Method and path of every request, without its query but for a watch's."""
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._port = int(self._server.getsockname()[1])

    def __enter__(self) -> Proxy:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=10)

    def kubeconfig(self) -> Path:
        path = self._plane.home / f"kubeconfig-proxy-{self._port}"
        content = json.loads(self._plane.kubeconfig().read_text())
        content["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._port}"}
        path.write_text(json.dumps(content))
        return path

    def cut(self) -> None:
        """End every connection, and accept no other."""
        self._blocked = True
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """From now on every answer is a head that never ends, a byte at a time."""
        self._hangs.set()

    def _trickle(self, client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self._blocked:
            client.sendall(b".")
            time.sleep(0.2)

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._blocked:
                client.close()
            else:
                self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        context = ssl._create_unverified_context()
        raw = socket.create_connection(("127.0.0.1", self._plane.port))
        with client, context.wrap_socket(raw) as server:
            self._open |= {client, server}
            with contextlib.suppress(OSError):
                self._pass_on(client, server)
            self._open -= {client, server}

    def _pass_on(self, client: socket.socket, server: ssl.SSLSocket) -> None:
        """Until either side ends. In one thread: TLS may not be read and written at once."""
        watching = False
        while True:
            readable: list[socket.socket] = [server]
            if not server.pending():
                readable, _, _ = select.select([client, server], [], [])
            if client in readable:
                if not (data := client.recv(65536)):
                    return None
                self._count(data)
                if self._hangs.is_set():
                    return self._trickle(client)
                watching = watching or b"watch=true" in data.split(b"\r\n", 1)[0]
                server.sendall(data)
            if server in readable:
                with contextlib.suppress(ssl.SSLWantReadError):  # a session's ticket, no data
                    server.settimeout(0)
                    if not (data := server.recv(65536)):
                        return None
                    client.sendall(self._let_through(data, watching=watching))
                server.settimeout(None)

    def _count(self, data: bytes) -> None:
        words = data.split(b"\r\n", 1)[0].decode(errors="replace").split()
        if len(words) == 3 and words[2].startswith("HTTP/"):
            path, _, query = words[1].partition("?")
            method = "WATCH" if "watch=true" in query else words[0]
            self.requests.append(f"{method} {path}")

    def _let_through(self, data: bytes, *, watching: bool) -> bytes:
        """All of it; of a watch only the head of the answer."""
        if not (self._swallow and watching):
            return data
        head, found, rest = data.partition(b"\r\n\r\n")
        if data.startswith(b"HTTP/") and found:
            self.swallowed += len(rest)
            return head + found
        self.swallowed += len(data)
        return b""
