"""P's half: a thread that sends descriptors of this worker's memory to peers that prove its secret.

Callers that violate the protocol, are silent or too many lose their connection and are counted. The
socket's folder may appear or vanish at any time; name and secret stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.mapped.files import (
    close_all,
    name_of,
    receive,
    stream_of,
    user_of,
)
from tandem.kvtransfer.transports.mapped.wire import (
    ANSWER,
    CHALLENGE,
    MAGIC,
    MAPPING,
    PROOF,
    SECRET_BYTES,
    SIZES,
    Given,
    Greeting,
    fresh,
    is_proof,
    key_for,
    socket_name,
)
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)

MAX_CALLERS = 256
GREETING_SECONDS = 2.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
LOOK_SECONDS = 30.0
"""Pause between two checks that the socket is still at its place."""


class _Caller:
    """A connection that has not proved the secret yet."""

    def __init__(self) -> None:
        self.challenge = fresh()
        self.since = time.monotonic()
        self.received = bytearray()
        self.files: list[int] = []

    def close(self) -> None:
        """Close the received descriptors."""
        close_all(self.files)
        self.files.clear()


class DescriptorServer:
    """Server of descriptors; listens on construction, or once it can after ``start``."""

    def __init__(
        self,
        given: Given,
        incarnation: Incarnation,
        folder: Path,
        *,
        on_garbage: Callable[[], None],
    ) -> None:
        """Take the descriptors over."""
        self.secret = os.urandom(SECRET_BYTES)
        self.path = folder / socket_name(incarnation)
        self._given = given
        self._incarnation, self._key = incarnation, key_for(self.secret, MAPPING)
        self._on_garbage = on_garbage
        self.unmet: str | None = None
        """Reason why callers cannot connect now, or None; read by any thread."""
        self._listener: socket.socket | None = None
        self._file = (0, 0)
        """Device and inode of ``path`` while this worker listens."""
        self._selector = selectors.DefaultSelector()
        self._pause, self._due = FIRST_PAUSE_SECONDS, 0.0
        self._listen()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._callers: dict[socket.socket, _Caller] = {}
        self._thread = threading.Thread(target=self._run, name="kv-descriptors", daemon=True)

    def start(self) -> None:
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; no descriptors are sent after it."""
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
            self._end_listening()
            self._stop_reader.close()
            self._selector.close()
            self._given.close()

    def _turn(self) -> bool:
        wait = max(0.0, self._due - time.monotonic())
        for key, _ in self._selector.select(min(0.5, wait) if self._callers else wait):
            if key.fileobj is self._stop_reader:
                return False
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is self._listener:
                self._accept(key.fileobj)
            else:
                self._receive(key.fileobj)
        now = time.monotonic()
        for caller, known in list(self._callers.items()):
            if now - known.since > GREETING_SECONDS:
                self._on_garbage()
                self._close(caller)
        if now >= self._due:
            self._look()
        return True

    def _look(self) -> None:
        if self._listener is None or _file_at(self.path) != self._file:
            self._end_listening()
            self._listen()
        self._due = time.monotonic() + LOOK_SECONDS
        if self.unmet is not None:
            self._due = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # of others' sockets
            _sweep(self.path.parent)
        try:
            self._listener, self._file = _listen(self.path)
        except TransportError as error:
            if str(error) != self.unmet:  # once, not at each try
                logger.warning("KV does not go by mapping: %s", error)
            self.unmet = str(error)
            return
        if self.unmet is not None:
            logger.info("KV of this worker can be mapped by its peers")
        self.unmet, self._pause = None, FIRST_PAUSE_SECONDS
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _end_listening(self) -> None:
        if self._listener is None:
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        if _file_at(self.path) == self._file:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            caller, _ = listener.accept()
        except OSError as error:
            logger.warning("a peer's call for descriptors could not be taken: %s", error)
            time.sleep(0.05)  # out of descriptors: no busy loop
            return
        caller.setblocking(False)
        try:
            stranger = user_of(caller) not in (None, os.geteuid())
            known = _Caller()
            if stranger or len(self._callers) >= MAX_CALLERS:
                raise TransportError("a caller of another user, or one too many")
            caller.send(CHALLENGE.pack(MAGIC, known.challenge))  # fits a new socket's buffer
        except (OSError, TransportError):
            self._on_garbage()
            caller.close()
            return
        self._callers[caller] = known
        self._selector.register(caller, selectors.EVENT_READ)

    def _receive(self, caller: socket.socket) -> None:
        known = self._callers[caller]
        try:
            data, files = receive(caller, ANSWER.size + 1 - len(known.received), 1)
            known.received += data
            known.files += files
            if data and len(known.received) < ANSWER.size and len(known.files) <= 1:
                return
            if known.received:  # a caller that leaves before its first message is no error
                self._answer(known)
        except BlockingIOError:
            return
        except (OSError, TransportError) as error:
            logger.debug("a caller is given no descriptors: %s", error)
            self._on_garbage()
        self._close(caller)

    def _answer(self, known: _Caller) -> None:
        """Send the descriptors to a caller that has proved the secret, by sockets that only both
        ends have. Raises TransportError for any other, OSError."""
        if len(known.received) != ANSWER.size or len(known.files) != 1:
            raise TransportError(f"{len(known.received)} bytes, {len(known.files)} descriptors")
        magic, consumer, nonce, proof = ANSWER.unpack(known.received)
        if magic != MAGIC:
            raise TransportError(f"its first bytes are {magic!r}, allowed: {MAGIC!r}")
        with stream_of(known.files.pop()) as pair:
            name = self.path.name.encode()
            greeting = Greeting(name, self._incarnation, consumer, known.challenge, nonce)
            named = name_of(pair)
            if not is_proof(proof, greeting.consumers(self._key, named)):
                raise TransportError("it does not have the secret")
            mine, theirs = socket.socketpair()
            with mine, theirs, contextlib.suppress(OSError):  # a peer that left
                own = greeting.producers(self._key, named, name_of(theirs))
                socket.send_fds(pair, [PROOF.pack(MAGIC, own)], [theirs.fileno()])
                sizes = SIZES.pack(MAGIC, *self._given.sizes)
                socket.send_fds(mine, [sizes], list(self._given.descriptors))

    def _close(self, caller: socket.socket) -> None:
        self._callers.pop(caller).close()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller)
        caller.close()


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _listen(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    """Return a socket and its device and inode. It listens before it gets its name, so that no
    starting worker takes it for a dead one. Raises TransportError."""
    unnamed = path.with_suffix(".new")
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"no socket for {path}: {error}") from error
    try:
        listener.bind(str(unnamed))
        unnamed.chmod(0o600)
        listener.listen(MAX_CALLERS)
        file = unnamed.lstat()
        unnamed.rename(path)
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            unnamed.unlink(missing_ok=True)
        raise TransportError(f"no socket at {path}: {error}") from error
    listener.setblocking(False)
    return listener, (file.st_dev, file.st_ino)


def _sweep(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):  # in a folder of another user
                    path.unlink(missing_ok=True)
            except OSError:
                continue  # full, or of another user
