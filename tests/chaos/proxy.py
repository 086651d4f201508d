"""Between decode workers and a prefill worker: its control frames and bytes of KV pass here, and
while a fault lasts some are held up, lost, said twice, in another order, changed or cut off.

The prefill worker advertises an address of the loopback at which only this listens; it itself is
as ever. Control frames are whole ZMQ messages; KV of tcp is a stream.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.chaos.aim import Aims
from tests.chaos.schedule import LINK_KINDS, Kind

ADVERTISED = "127.0.0.2"
LISTENED = "127.0.0.1"
SHARE = 0.1
"""Of the units that pass while a fault lasts, behind the first, which is always hurt."""
LONGEST_DELAY = 0.3
MOST_BYTES = 64 << 10
_GREETING = 64
"""Bytes of ZMTP before its frames."""
_MORE, _LONG, _COMMAND = 1, 2, 4

Unit = bytes


class Proxy:
    """In front of one prefill worker's ports, on a thread of its own."""

    def __init__(
        self,
        control: int,
        data: int,
        seed: int,
        *,
        name: str = "",
        aims: Aims | None = None,
    ) -> None:
        """``name`` of the worker behind it, for the ``aims`` that wait for frames of pulls."""
        self.name = name
        self._aims = Aims() if aims is None else aims
        self.hurt: dict[Kind, int] = dict.fromkeys(LINK_KINDS, 0)
        """Units that were, by what was done to them."""
        self.passed = 0
        self._ports = {control: _messages, data: _pieces}
        self._draw = random.Random(seed)
        self._kind: Kind | None = None
        self._until = 0.0
        self._owed = False
        self._severed = False
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(10), "the proxy does not listen"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def disturb(self, kind: Kind, seconds: float) -> None:
        """From now on, for so long, beginning with the next unit; from any thread."""

        def begin() -> None:
            self._kind, self._until = kind, self._loop.time() + seconds
            self._owed = True

        self._loop.call_soon_threadsafe(begin)

    def sever(self) -> None:
        """Close every connection and take no other until ``restore``; from any thread."""
        self._loop.call_soon_threadsafe(self._sever)

    def restore(self) -> None:
        self._severed = False

    def _sever(self) -> None:
        self._severed = True
        for each in list(self._connections):
            each.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        servers = [
            self._loop.run_until_complete(
                asyncio.start_server(self._serving(port), ADVERTISED, port)
            )
            for port in self._ports
        ]
        self._up.set()
        self._loop.run_forever()
        for each in servers:
            each.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _serving(
        self, port: int
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = asyncio.current_task()
            assert own is not None, "a connection is served by a task"
            self._connections.add(own)
            own.add_done_callback(self._connections.discard)
            with suppress(OSError, asyncio.CancelledError):
                if self._severed:
                    raise ConnectionRefusedError
                there, back = await asyncio.open_connection(LISTENED, port)
                ways = [
                    asyncio.create_task(self._carry(reader, back, port)),
                    asyncio.create_task(self._carry(there, writer, port)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in ways:
                        each.cancel()
                    back.close()
            writer.close()

        return serve

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        """One way of a connection; returns when it is over."""
        read = self._ports[port]
        later: Unit | None = None
        with suppress(OSError, asyncio.IncompleteReadError):
            if read is _messages:
                await _pass_greeting(reader, writer)
            while unit := await read(reader):
                self.passed += 1
                own = read is _messages and unit[0] & _COMMAND
                if read is _messages and not own and (held := self._aims.take(unit, self.name)):
                    await asyncio.to_thread(held.wait)
                kind = None if own else self._drawn()
                if kind is Kind.DELAY:
                    await asyncio.sleep(self._draw.uniform(0.0, LONGEST_DELAY))
                elif kind is Kind.CUT:
                    return
                elif kind is Kind.CORRUPT:
                    unit = _flipped(unit, self._draw, behind=9 if read is _messages else 0)
                elif kind is Kind.REORDER and read is _messages and later is None:
                    later = unit
                    continue
                if kind is not Kind.DROP or read is not _messages:
                    writer.write(unit)
                if kind is Kind.REPEAT and read is _messages:
                    writer.write(unit)
                if later is not None:
                    writer.write(later)
                    later = None
                await writer.drain()

    def _drawn(self) -> Kind | None:
        if self._kind is None or self._loop.time() > self._until:
            return None
        if self._draw.random() > SHARE and not self._owed:
            return None
        self._owed = False
        self.hurt[self._kind] += 1
        return self._kind


async def _pass_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """In pieces as they come: each end waits for the beginning of the other's."""
    left = _GREETING
    while left and (piece := await reader.read(left)):
        left -= len(piece)
        writer.write(piece)
        await writer.drain()


async def _pieces(reader: asyncio.StreamReader) -> Unit:
    return await reader.read(MOST_BYTES)


async def _messages(reader: asyncio.StreamReader) -> Unit:
    """The next ZMQ message, with all its frames, or a command."""
    unit = b""
    while True:
        flags = await reader.readexactly(1)
        size = await reader.readexactly(8 if flags[0] & _LONG else 1)
        body = await reader.readexactly(int.from_bytes(size, "big"))
        unit += flags + size + body
        if not flags[0] & _MORE:
            return unit


def _flipped(unit: Unit, draw: random.Random, *, behind: int) -> Unit:
    """One bit is another. Of a message not in its first frame's length, without which the rest is
    nothing: that is ``CUT``."""
    at = draw.randrange(min(behind, len(unit) - 1), len(unit))
    return unit[:at] + bytes([unit[at] ^ (1 << draw.randrange(8))]) + unit[at + 1 :]
