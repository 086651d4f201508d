"""One call: what came with it, the messages that come and go, and its end.

``http2`` makes one for each stream of a connection and tells it what arrives; whoever answers reads
messages, writes some, and ends it with a status. Frames of data are made here, and sent past the
state machine of ``h2``: once for every token, and its windows are all that they touch.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol
from urllib.parse import quote

import grpc
from h2.connection import H2Connection
from h2.stream import H2Stream

from tandem.router.closing import MIN_DRAINED
from tandem.router.held_bytes import PROGRESS_BYTES, HeldBytes
from tandem.router.rpc.errors import Metadata, RpcError
from tandem.router.tenant import NO_KEYS

STALL_SECONDS = 15.0
"""A message that has begun, and of which too little comes in this time, is given up."""
MOST_UNREAD = 256
"""Messages of one call that may wait to be read."""
RETRY = (("retry-after", "2"),)
_FRAME = struct.Struct(">IBI")
"""Length (3 bytes) and type, which is 0 for data; flags; stream."""
_FRAMED_MESSAGE = struct.Struct(">IBIBI")
"""The same, and what stands before a message: whether it is compressed, and its length."""
_MESSAGE = struct.Struct(">BI")
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class Link(Protocol):
    """What a call needs of its connection."""

    h2: H2Connection
    is_paused: bool
    """Whether the client takes less than it is sent."""

    granted: int
    """Bytes that the client made room for so far, of all calls together."""

    write_seconds: float
    """How long what waits to be written may wait without moving."""

    send: Callable[[bytes], None]
    """Takes bytes for the client."""

    waiting: dict[Call, None]
    """Calls with a message that waits for room, in the order in which they began to wait."""

    def clock(self) -> float:
        """Seconds in which the client's frames were read: it stands still while it is paused."""

    def flush(self) -> None:
        """What ``h2`` has to say."""


_NOTHING = memoryview(b"")


class NotRead(RpcError):
    """The client takes next to nothing of its answer."""


class Call:
    """A stream of one connection."""

    def __init__(
        self,
        link: Link,
        stream_id: int,
        *,
        path: str,
        metadata: Mapping[str, str],
        deadline: float | None,
        max_message_bytes: int,
        held: HeldBytes,
    ) -> None:
        """``deadline`` is a time of the loop."""
        self.path = path
        self.metadata = metadata
        self.tenant = NO_KEYS
        """Of the caller, once its key is known."""
        self.arrived = asyncio.get_running_loop().time()
        """When it came in."""
        self.deadline = deadline
        self.task: asyncio.Task[None] | None = None
        self.is_open = True
        """False once the client has its status, or is gone."""
        self._held = held
        self._holding = held.enter("", self._made_room)
        self.num_taken = 0
        """Bytes of what was received and is not let go of."""
        self._link = link
        self._id = stream_id
        self.stream: H2Stream = link.h2.streams[stream_id]
        self._max_message_bytes = max_message_bytes
        self._partial = bytearray()
        self._messages: deque[bytes] = deque()
        self._failure: RpcError | None = None
        self._ended = False
        self._arrival = asyncio.Event()
        self._begun = False
        self._pending = _NOTHING
        """Of the message that waits for room, what is unsent: a view, as it is cut often."""
        self._drained = asyncio.Event()

    async def receive(self) -> bytes | None:
        """The client's next message; None when there is no other. It counts as held until
        ``let_go``. Raises RpcError."""
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            await self._arrived()
        message = self._messages.popleft()
        self.num_taken += len(message)
        return message

    async def _arrived(self) -> None:
        """Wait until something came. Raises RpcError for a message that stands still."""
        self._arrival.clear()
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._arrival.wait()
        except TimeoutError:
            if self._partial and self._held.seconds_still(self._holding) >= STALL_SECONDS:
                words = (
                    f"less than {PROGRESS_BYTES} bytes of the message came in {STALL_SECONDS:g} s; "
                    "send it again in one go"
                )
                raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, words, RETRY) from None

    def let_go(self) -> None:
        """What was received is made into something else: its bytes no longer count."""
        taken, self.num_taken = self.num_taken, 0
        self._held.let_go(self._holding, taken)

    def belongs_to(self, tenant: str) -> None:
        """Its key is known: what it holds counts for this tenant."""
        self._held.belongs_to(self._holding, tenant)

    def feed(self, data: bytes) -> None:
        """Bytes of messages came."""
        if self._failure is not None or not self.is_open:
            return
        if not self._held.add(self._holding, len(data), begins=not self._partial):
            self._made_room()
            return
        self._partial += data
        while len(self._partial) >= _MESSAGE.size and self._failure is None:
            compressed, size = _MESSAGE.unpack_from(self._partial)
            if compressed:
                self.fail(grpc.StatusCode.UNIMPLEMENTED, "messages are taken uncompressed alone")
            elif self._holding.num_bytes > self._max_message_bytes + _MESSAGE.size or (
                size > self._max_message_bytes
            ):
                most = self._max_message_bytes
                self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message has at most {most} bytes")
            elif len(self._partial) < _MESSAGE.size + size:
                return
            elif len(self._messages) == MOST_UNREAD:
                words = f"{MOST_UNREAD} messages wait to be answered: send fewer at a time"
                self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, words, RETRY)
            else:
                self._messages.append(bytes(self._partial[_MESSAGE.size : _MESSAGE.size + size]))
                del self._partial[: _MESSAGE.size + size]
                self._held.let_go(self._holding, _MESSAGE.size)
                self._arrival.set()

    def end_of_requests(self) -> None:
        """The client has said all."""
        self._ended = True
        self._held.came_whole(self._holding)
        if self._partial and self._failure is None:
            self.fail(grpc.StatusCode.INVALID_ARGUMENT, "the last message was cut short")
        self._arrival.set()

    def fail(self, code: grpc.StatusCode, words: str, metadata: Metadata = ()) -> None:
        """Nothing more is taken from the client; whoever reads next raises this."""
        self._failure = RpcError(code, words, metadata)
        self._partial.clear()
        self._messages.clear()
        self.over()
        self._arrival.set()

    def write(self, message: bytes) -> bool:
        """Send a message. False: wait for ``drained`` before the next."""
        link, stream = self._link, self.stream
        if not self.is_open:
            return True
        if not self._begun:
            self._begin()
        size = _MESSAGE.size + len(message)
        h2 = link.h2
        if (
            size > h2.outbound_flow_control_window
            or size > stream.outbound_flow_control_window
            or size > h2.max_outbound_frame_size
        ):
            assert not self._pending, "one message waits at a time"
            self._pending = memoryview(_MESSAGE.pack(0, len(message)) + message)
            link.waiting[self] = None
            self._drained.clear()
            self.pump()
            return not self._pending and not link.is_paused
        h2.outbound_flow_control_window -= size
        stream.outbound_flow_control_window -= size
        link.send(_FRAMED_MESSAGE.pack(size << 8, 0, self._id, 0, len(message)) + message)
        return not link.is_paused

    async def drained(self) -> None:
        """Until the client has room for another message, or is gone.

        Raises NotRead where it takes too little of the one that waits.
        """
        link = self._link
        while self._waits():
            unsent, granted, end = (
                len(self._pending),
                link.granted,
                link.clock() + link.write_seconds,
            )
            while self._waits() and (left := end - link.clock()) > 0:
                self._drained.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if link.is_paused else left):
                        await self._drained.wait()
            if self._waits() and self._is_stuck(unsent, granted):
                words = "the client does not read its answer"
                raise NotRead(grpc.StatusCode.DEADLINE_EXCEEDED, words)

    def _waits(self) -> bool:
        return self.is_open and (bool(self._pending) or self._link.is_paused)

    def _is_stuck(self, unsent: int, granted: int) -> bool:
        """Whether too little has moved since so much was unsent and granted."""
        if not self._pending:
            return False  # it waits for the connection alone, which has a limit of its own
        least = min(MIN_DRAINED, unsent)
        if unsent - len(self._pending) >= least:
            return False
        # Others may have taken what the client made room for: who waits longer is written first.
        is_behind_others = self.stream.outbound_flow_control_window > 0
        return not (is_behind_others and self._link.granted - granted >= least)

    def pump(self) -> None:
        """Send of what waits as much as the client's windows have room for."""
        h2, stream = self._link.h2, self.stream
        if not self._pending:
            return
        while self._pending and self.is_open:
            windows = (h2.outbound_flow_control_window, stream.outbound_flow_control_window)
            room = min(*windows, h2.max_outbound_frame_size)
            if room <= 0:
                return
            part, self._pending = self._pending[:room], self._pending[room:]
            h2.outbound_flow_control_window -= len(part)
            stream.outbound_flow_control_window -= len(part)
            self._link.send(_FRAME.pack(len(part) << 8, 0, self._id) + bytes(part))
        self._drop()
        self.wake()

    def wake(self) -> None:
        """Whoever waits for room looks again."""
        self._drained.set()

    def finish(
        self,
        code: grpc.StatusCode,
        words: str = "",
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """The last that the client hears of it."""
        if not self.is_open:
            return
        self.is_open = False
        h2 = self._link.h2
        if self._pending:  # a message that is cut short cannot have a status behind it
            self._drop()
            h2.reset_stream(self._id, error_code=8)
        else:
            trailers = [("grpc-status", str(code.value[0])), *metadata]
            if words:
                trailers.insert(1, ("grpc-message", quote(words, safe=_PRINTABLE)))
            head = [] if self._begun else _HEAD
            h2.send_headers(self._id, [*head, *trailers], end_stream=True)
            if not self.stream.closed:  # the client may send more: it need not
                h2.reset_stream(self._id, error_code=0)
        self._link.flush()
        self.wake()

    def lost(self) -> None:
        """The client has given it up, or is gone."""
        if not self.is_open:
            return
        self.is_open = False
        self._drop()
        self.wake()
        if self.task is not None:
            self.task.cancel()

    def over(self) -> None:
        """Nobody answers it any more: what is left of its request goes."""
        self.num_taken = 0
        self._held.let_go(self._holding)

    def _drop(self) -> None:
        """No message waits for room."""
        self._pending = _NOTHING
        self._link.waiting.pop(self, None)

    def _made_room(self) -> None:
        """Return what it holds is needed for others, or is more than it may hold."""
        words = f"the router is full: {self._held.why_full(self._holding)}"
        self.fail(grpc.StatusCode.UNAVAILABLE, words, RETRY)

    def _begin(self) -> None:
        self._begun = True
        self._link.h2.send_headers(self._id, _HEAD)
        self._link.flush()


_HEAD = [
    (":status", "200"),
    ("content-type", "application/grpc"),
    ("grpc-accept-encoding", "identity"),
]
