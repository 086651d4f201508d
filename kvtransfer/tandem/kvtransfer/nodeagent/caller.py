"""One connection to the agent: received messages, queued answers, and its registration."""

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
"""Value from asm-generic/socket.h; Python has no name for it."""
_MAX_GROUPS = 256
"""Most groups of a caller that are read; a caller in more counts as in its own group only."""
_BATCH = 64
"""Most messages read from one caller in a row."""


class Garbage(Exception):
    """Data that is not of the protocol; the text names it."""


class Caller:
    """A worker that is registered or may register."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        sock.setblocking(False)
        self.sock = sock
        self.since = time.monotonic()
        self.challenge = fresh()
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self.ended = False
        """True once no more is read from it; queued answers are still sent."""
        self._unsaid: deque[tuple[bytes, int | None]] = deque()

    @property
    def is_registered(self) -> bool:
        """Return whether it is registered."""
        return self.producer is not None or self.consumer is not None

    @property
    def has_unsaid(self) -> bool:
        """Return whether answers are queued because its socket is full."""
        return bool(self._unsaid)

    def may_call(self, group: int | None) -> bool:
        """Return whether it belongs to this process's user, or to the group if there is one."""
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
        """Yield received messages, a bounded number, each with its descriptors, which are closed
        after it. Set ``ended`` at the connection's end. Raises Garbage."""
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
        """Send an answer, now or when its socket has room; ``slot`` is free again once sent."""
        self._unsaid.append((encode(message), slot))
        self.flush()

    def flush(self) -> None:
        """Send the queued answers."""
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
