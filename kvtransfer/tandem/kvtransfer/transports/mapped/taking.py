"""D's half of the exchange of descriptors: one call at P's socket, which never blocks.

Nothing is accepted before P has proved the secret, and then only by a socket that P made. See
``wire`` for the messages.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path

from tandem.kvtransfer.errors import NoSocketYet, TransportError
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
    SIZES,
    Given,
    Greeting,
    MappedCard,
    fresh,
    is_proof,
    key_for,
    place_of,
)
from tandem.protocol.ids import Incarnation

GREETING_SECONDS = 10.0
"""Maximum time between the call and the last descriptor."""


class Call:
    """Call to one producer; ``poll`` until it returns the memory or raises."""

    def __init__(self, folder: Path, card: MappedCard, incarnation: Incarnation) -> None:
        """Begin. Raises NoSocketYet if both meet in one folder and the socket cannot be called,
        TransportError for another machine's worker, no socket, or no descriptor left."""
        self._near = _is_place(folder, card.place)
        self._path = str(folder / card.name)
        self._card, self._incarnation = card, incarnation
        self._key = key_for(card.secret, MAPPING)
        self._until = time.monotonic() + GREETING_SECONDS
        self._connected = False
        self._greeting: Greeting | None = None
        self._sent = b""
        """Name of the socket that was sent to P."""
        self._pair: socket.socket | None = None
        """Socket on which P proves the secret; only this end is open here."""
        self._theirs: socket.socket | None = None
        """Socket on which P sends the descriptors."""
        try:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise self._failed(error) from error
        self._sock.setblocking(False)
        try:
            self._connect()
        except BlockingIOError:
            return  # there are many callers: ``poll`` tries again
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        except TransportError:
            self.close()
            raise

    def poll(self) -> Given | None:
        """Return the descriptors from P, which the caller closes; None while they have not come.
        Raises TransportError."""
        try:
            self._connect()
            if self._greeting is None:
                self._greeting = self._answer()
            if self._theirs is None:
                self._theirs = self._check(self._greeting)
            return self._take(self._theirs)
        except BlockingIOError:
            if time.monotonic() > self._until:
                problem = f"{self._path} has not greeted within {GREETING_SECONDS:g} s"
                raise TransportError(problem) from None
            return None
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Cancel the call."""
        for each in (self._sock, self._pair, self._theirs):
            if each is not None:
                each.close()

    def _failed(self, error: OSError) -> TransportError:
        # Permission to an existing socket does not change with time.
        forbidden = isinstance(error, PermissionError) and os.path.exists(self._path)
        kind = NoSocketYet if self._near and not forbidden else TransportError
        return kind(f"no descriptors from {self._path}: {error}")

    def _connect(self) -> None:
        if self._connected:
            return
        if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
            raise TransportError(f"{self._path} is not a socket")
        self._sock.connect(self._path)
        self._connected = True
        user = user_of(self._sock)
        if user not in (None, os.geteuid()):
            raise TransportError(f"{self._path} belongs to user {user}, not {os.geteuid()}")

    def _answer(self) -> Greeting:
        data, _ = self._receive(self._sock, CHALLENGE.size, files=0)
        card, (_, challenge) = self._card, CHALLENGE.unpack(data)
        names = card.name.encode(), card.incarnation, self._incarnation
        greeting = Greeting(*names, challenge, fresh())
        self._pair, theirs = socket.socketpair()
        self._pair.setblocking(False)
        with theirs:
            self._sent = name_of(theirs)
            proof = greeting.consumers(self._key, self._sent)
            answer = ANSWER.pack(MAGIC, greeting.consumer, greeting.answer, proof)
            socket.send_fds(self._sock, [answer], [theirs.fileno()])
        return greeting

    def _check(self, greeting: Greeting) -> socket.socket:
        assert self._pair is not None, "it has answered"
        data, (descriptor,) = self._receive(self._pair, PROOF.size, files=1)
        found = stream_of(descriptor)
        expected = greeting.producers(self._key, self._sent, name_of(found))
        if not is_proof(PROOF.unpack(data)[1], expected):
            found.close()
            raise TransportError(f"{self._path} has not proved the producer's secret")
        return found

    def _take(self, sock: socket.socket) -> Given:
        data, files = self._receive(sock, SIZES.size, files=3)
        _, *sizes = SIZES.unpack(data)
        if not all(sizes):
            close_all(files)
            raise TransportError(f"{self._path} sent memory of size 0: {sizes}")
        return Given((files[0], files[1], files[2]), (sizes[0], sizes[1], sizes[2]))

    def _receive(self, sock: socket.socket, size: int, *, files: int) -> tuple[bytes, list[int]]:
        data, found = receive(sock, size, files)
        if (len(data), len(found), data[:8]) == (size, files, MAGIC):
            return data, found
        close_all(found)
        if data[:6] == MAGIC[:6] and data[:8] != MAGIC:
            raise TransportError(f"{self._path} sent {data[:8]!r} first, allowed: {MAGIC!r}")
        got = f"{len(data)} bytes and {len(found)} descriptors"
        raise TransportError(f"{self._path} does not follow the protocol: it sent {got}")


def _is_place(folder: Path, place: bytes) -> bool:
    try:
        return place == place_of(folder)
    except TransportError:
        return False
