"""D's half of getting descriptors: one call at P's socket, that never blocks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tandem.kvtransfer.errors import NoSocketYet, TransportError
from tandem.kvtransfer.transports.mapped.wire import (
    GREETING,
    MAGIC,
    SIZES,
    Given,
    MappedCard,
    place_of,
)


class Call:
    """To one producer; ``poll`` until it gives or raises."""

    def __init__(self, folder: Path, card: MappedCard) -> None:
        """Begin. Raises TransportError where there is no such socket: another machine's worker; and
        where this process has no descriptor left. NoSocketYet where both meet in one folder."""
        self._near = _is_place(folder, card.place)
        self._path = str(folder / card.name)
        self._greeting = GREETING.pack(MAGIC, card.incarnation, card.secret)
        self._greeted = False
        try:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise self._failed(error) from error
        self._sock.setblocking(False)
        try:
            self._greet()
        except BlockingIOError:
            return  # there are many callers: ``poll`` tries again
        except OSError as error:
            self.close()
            raise self._failed(error) from error

    def poll(self) -> Given | None:
        """What P gave, which the caller closes; None as long as it has not. Raises
        TransportError."""
        try:
            self._greet()
            return self._receive()
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Give the call up."""
        self._sock.close()

    def _failed(self, error: OSError) -> TransportError:
        # A socket that is there and not for this user will not be, however long one waits.
        forbidden = isinstance(error, PermissionError) and os.path.exists(self._path)
        kind = NoSocketYet if self._near and not forbidden else TransportError
        return kind(f"no descriptors from {self._path}: {error}")

    def _greet(self) -> None:
        if not self._greeted:
            self._sock.connect(self._path)
            self._sock.send(self._greeting)  # a fresh socket's buffer holds it
            self._greeted = True

    def _receive(self) -> Given:
        data, descriptors, _, _ = socket.recv_fds(self._sock, SIZES.size, 3)
        try:
            if len(data) != SIZES.size or len(descriptors) != 3:
                raise TransportError(f"{self._path} gave {len(descriptors)} descriptors, not 3")
            magic, *sizes = SIZES.unpack(data)
            if magic != MAGIC or not all(sizes):
                raise TransportError(f"{self._path} does not follow the protocol")
        except TransportError:
            for each in descriptors:
                os.close(each)
            raise
        return Given(
            (descriptors[0], descriptors[1], descriptors[2]), (sizes[0], sizes[1], sizes[2])
        )


def _is_place(folder: Path, place: bytes) -> bool:
    try:
        return place == place_of(folder)
    except TransportError:
        return False
