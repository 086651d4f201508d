"""P's half: a thread that gives descriptors of this worker's memory to peers that greet rightly.

Whatever does not follow the protocol (garbage, a wrong secret, silence before the greeting, more
callers than there are places) loses its connection and is counted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.mapped.wire import (
    GREETING,
    MAGIC,
    SECRET_BYTES,
    SIZES,
    Given,
    socket_name,
)
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)

MAX_CALLERS = 256
GREETING_SECONDS = 2.0


class DescriptorServer:
    """Listens on construction; ``start`` runs the thread."""

    def __init__(
        self,
        given: Given,
        incarnation: Incarnation,
        folder: Path,
        *,
        on_garbage: Callable[[], None],
    ) -> None:
        """Takes the descriptors over. Raises TransportError."""
        self.secret = os.urandom(SECRET_BYTES)
        self.path = folder / socket_name(incarnation)
        self._given = given
        self._expected = GREETING.pack(MAGIC, incarnation, self.secret)
        self._on_garbage = on_garbage
        _sweep(folder)
        try:
            self._listener = _listen(self.path)
        except TransportError:
            given.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._callers: dict[socket.socket, tuple[bytearray, float]] = {}
        """What each has said so far, and since when it is here."""
        self._thread = threading.Thread(target=self._run, name="kv-descriptors", daemon=True)

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; nobody is given anything after it."""
        self._stop_writer.send(b"\0")
        self._thread.join(timeout=5.0)
        self._stop_writer.close()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for caller in list(self._callers):
                self._close(caller)
            self._listener.close()
            self.path.unlink(missing_ok=True)
            self._stop_reader.close()
            self._selector.close()
            self._given.close()

    def _turn(self) -> bool:
        """Serve what is due; False when the end was asked for."""
        for key, _ in self._selector.select(0.5 if self._callers else None):
            if key.fileobj is self._stop_reader:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj)
        now = time.monotonic()
        for caller, (_, since) in list(self._callers.items()):
            if now - since > GREETING_SECONDS:
                self._on_garbage()
                self._close(caller)
        return True

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError as error:
            logger.warning("a peer's call for descriptors could not be taken: %s", error)
            time.sleep(0.05)  # out of descriptors: do not spin at the door
            return
        if len(self._callers) >= MAX_CALLERS:
            self._on_garbage()
            caller.close()
            return
        caller.setblocking(False)
        self._callers[caller] = (bytearray(), time.monotonic())
        self._selector.register(caller, selectors.EVENT_READ)

    def _hear(self, caller: socket.socket) -> None:
        said, _ = self._callers[caller]
        try:
            data = caller.recv(GREETING.size + 1 - len(said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if data and len(said) < GREETING.size:
            return
        if hmac.compare_digest(bytes(said), self._expected):
            with contextlib.suppress(OSError):  # who left is not to be told
                sizes = SIZES.pack(MAGIC, *self._given.sizes)
                socket.send_fds(caller, [sizes], list(self._given.descriptors))
        elif said:
            self._on_garbage()
        self._close(caller)

    def _close(self, caller: socket.socket) -> None:
        del self._callers[caller]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller)
        caller.close()


def _listen(path: Path) -> socket.socket:
    """A socket that listens before it has its name: who begins beside this worker takes one at
    which nobody listens yet for one whose worker was killed. Raises TransportError."""
    listener, unnamed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path.with_suffix(".new")
    try:
        listener.bind(str(unnamed))
        unnamed.chmod(0o600)
        listener.listen(MAX_CALLERS)
        unnamed.rename(path)
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            unnamed.unlink(missing_ok=True)
        raise TransportError(f"no socket at {path}: {error}") from error
    listener.setblocking(False)
    return listener


def _sweep(folder: Path) -> None:
    """Remove sockets at which nobody listens: their workers were killed."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # full, or not ours to ask
