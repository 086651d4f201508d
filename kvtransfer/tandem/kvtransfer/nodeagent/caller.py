"""One connection to the agent: what came, what is to be said, and what it registered."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Generator

import msgspec

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.nodeagent.registrations import Consumer, Producer
from tandem.kvtransfer.transports.agent.wire import (
    MAX_FILES,
    MAX_MESSAGE,
    ToAgent,
    ToWorker,
    encode,
    to_agent,
)
from tandem.kvtransfer.transports.mapped.files import close_all, receive
from tandem.kvtransfer.transports.mapped.proofs import fresh

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59
"""Of asm-generic/socket.h; Python does not name it."""
_MAX_GROUPS = 256
"""Of a caller, that can be asked for; who is in more has none but its own."""
_BATCH = 64
"""Messages that one caller is heard at a time."""


class Garbage(Exception):
    """What came is not of the protocol; the text says what."""


class Caller:
    """A worker, or who would be one."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        sock.setblocking(False)
        self.sock = sock
        self.since = time.monotonic()
        self.challenge = fresh()
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self.ended = False
        """Nothing is heard of it any more; what is to be said still is."""
        self._unsaid: deque[tuple[bytes, int | None]] = deque()

    @property
    def is_registered(self) -> bool:
        """Whether it may stay."""
        return self.producer is not None or self.consumer is not None

    @property
    def has_unsaid(self) -> bool:
        """Whether its socket took not all."""
        return bool(self._unsaid)

    def may_call(self, group: int | None) -> bool:
        """Whether it is of this process's user, or of the group if there is one."""
        level = socket.SOL_SOCKET
        said = self.sock.getsockopt(level, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, own_group = _CREDENTIALS.unpack(said)
        if user == os.geteuid() or group is None:
            return bool(user == os.geteuid())
        size, groups = struct.calcsize("I"), b""
        with contextlib.suppress(OSError):
            groups = self.sock.getsockopt(level, _SO_PEERGROUPS, _MAX_GROUPS * size)
        return group in (own_group, *struct.unpack(f"{len(groups) // size}I", groups))

    def heard(self) -> Generator[tuple[ToAgent, list[int]]]:
        """Messages that have come, some, and the descriptors beside each, which are closed behind
        it. At the connection's end ``ended`` is set. Raises Garbage."""
        for _ in range(_BATCH):
            try:
                data, files = receive(self.sock, MAX_MESSAGE, MAX_FILES)
            except BlockingIOError:
                return
            except TransportError as error:
                raise Garbage(str(error)) from error
            except OSError:
                data, files = b"", []
            try:
                if not data:  # its end; or an empty packet, which says nothing either
                    self.ended = True
                    return
                yield self._read(data), files
            finally:
                close_all(files)

    def _read(self, data: bytes) -> ToAgent:
        try:
            return to_agent.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Garbage(f"no message: {error}") from error

    def say(self, message: ToWorker, slot: int | None = None) -> None:
        """Say it, now or when its socket has room; ``slot`` is free again as soon as it is said."""
        self._unsaid.append((encode(message), slot))
        self.flush()

    def flush(self) -> None:
        """Say what has not been said."""
        with contextlib.suppress(BlockingIOError):
            while self._unsaid:
                data, slot = self._unsaid[0]
                try:
                    self.sock.send(data)
                except BlockingIOError:
                    raise
                except OSError:  # it is gone, and is not to be told
                    self._unsaid.clear()
                    self.ended = True
                    return
                self._unsaid.popleft()
                if slot is not None and self.consumer is not None:
                    self.consumer.busy.discard(slot)

    def close(self) -> None:
        """End the connection; what it registered ends with it, the producer by its owner."""
        self.sock.close()
        if self.consumer is not None:
            self.consumer.close()
