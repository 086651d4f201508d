"""Clients that say much in one read, or say much that brings nothing: nobody else waits for it."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc
import pytest
from h2.events import ConnectionTerminated, PingAckReceived
from hpack import Encoder
from tests.router.rpc.test_rpc_connection import HEAD, Both, Owner

from tandem.router.rpc.call import Call
from tandem.router.rpc.calm import SPARE, TURN, Calm
from tandem.router.rpc.frames import DATA, HEADERS, PING, WINDOW_UPDATE, Frame

SETTINGS, PRIORITY, RST_STREAM = 4, 2, 3


def framed(kind: int, body: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """Bytes of a frame."""
    return struct.pack(">IBI", len(body) << 8 | kind, flags, stream) + body


def ping(number: int) -> bytes:
    """A PING that is told from others."""
    return framed(PING, number.to_bytes(8, "big"))


class Patient(Owner):
    """A server whose calls begin, and go on."""

    max_calls = 1_000

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Call] = []

    def begin(self, call: Call) -> bool:
        """In a task that has nothing to do."""
        call.task = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
        self.begun.append(call)
        return True


class Greeted(Both):
    """A client that has greeted the server."""

    def __init__(self) -> None:
        owner = Patient()
        super().__init__(owner)
        self.begun = owner.begun
        self.say()

    async def heard(self, data: bytes) -> list[Any]:
        """What the client hears once all that it says at once was taken."""
        await self.take(data)
        said, self.wire.written = self.wire.written, b""
        return self.client.receive_data(said)

    async def take(self, data: bytes) -> None:
        """All that it says at once."""
        self.server.data_received(data)
        for _ in range(100_000):
            if self.wire.is_ended or self.wire.is_closed or not self.server._is_behind:
                break
            await asyncio.sleep(0)


def calls(count: int) -> bytes:
    """That many begin, and have more to say."""
    encoder = Encoder()
    return b"".join(
        framed(HEADERS, encoder.encode(HEAD), flags=4, stream=2 * each + 1) for each in range(count)
    )


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (framed(SETTINGS) * 3_000, 3_000),
        (framed(SETTINGS, struct.pack(">HI", 4, 70_000) * 1_000) * 20, 20),
        (framed(PRIORITY, bytes(4) + b"\1", stream=3) * 3_000, 3_000),
        (framed(0x50) * 3_000, 3_000),
        (b"".join(map(ping, range(10_000))), 10_000),
        (calls(500), 500),
    ],
)
async def test_others_have_turns_while_what_came_is_taken(
    monkeypatch: pytest.MonkeyPatch, data: bytes, count: int
) -> None:
    """One read may bring hundreds of kilobytes, of anybody who may connect."""
    both = Greeted()
    taken: list[int] = [0]
    count_frame = Calm.heard

    def heard(calm: Calm, frame: Frame) -> int:
        taken[-1] += 1
        return count_frame(calm, frame)

    def other_turn() -> None:
        taken.append(0)
        loop.call_soon(other_turn)

    monkeypatch.setattr(Calm, "heard", heard)
    loop = asyncio.get_running_loop()
    loop.call_soon(other_turn)
    await both.heard(data)

    assert sum(taken) == count
    assert max(taken) <= min(TURN, count // 3)
    assert not both.wire.is_closed


async def test_what_is_taken_in_turns_keeps_its_order() -> None:
    """Nothing more is read of the connection meanwhile, and what comes all the same stands behind
    it."""
    both = Greeted()
    both.server.data_received(b"".join(map(ping, range(1_000))))
    assert not both.wire.is_read
    events = await both.heard(b"".join(map(ping, range(1_000, 2_000))))

    numbers = [each.ping_data for each in events if isinstance(each, PingAckReceived)]
    assert [int.from_bytes(each, "big") for each in numbers] == list(range(2_000))
    assert both.wire.is_read


async def test_a_fault_in_a_later_turn_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does while bytes arrive: nothing was ever read of it again, and its calls hung."""
    both = Greeted()
    both.server.data_received(b"".join(map(ping, range(1_000))))

    def broken(calm: Calm, frame: Frame) -> int:
        raise RuntimeError("a fault")

    monkeypatch.setattr(Calm, "heard", broken)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert both.wire.is_closed


async def test_who_reads_nothing_is_answered_nothing_more() -> None:
    """What was left when the writes stopped is taken when they go on, a turn at a time."""
    both = Greeted()
    both.server.data_received(b"".join(map(ping, range(1_000))))
    both.server.pause_writing()
    said = len(both.wire.written)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(both.wire.written) == said
    assert not both.wire.is_read
    both.server.resume_writing()
    both.server.pause_writing()
    both.server.resume_writing()
    assert len(both.wire.written) == said
    await asyncio.sleep(0)
    assert len(both.wire.written) < 3 * said
    await both.heard(b"")
    assert both.wire.is_read


async def test_nothing_is_taken_of_a_connection_that_is_lost() -> None:
    """However much had come."""
    both = Greeted()
    both.server.data_received(calls(100))
    begun = len(both.begun)
    both.wire.abort()
    both.server.connection_lost(None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert 0 < begun == len(both.begun)
    assert not any(call.is_open for call in both.begun)


NOTHING = {
    "settings": framed(SETTINGS),
    "settings that were heard": framed(SETTINGS, flags=1),
    "priority": framed(PRIORITY, bytes(4) + b"\1", stream=3),
    "of no known kind": framed(0x50),
    "data of no byte": framed(DATA, stream=1),
    "an end of what has ended": framed(RST_STREAM, bytes(4), stream=3),
    "ping": ping(1),
}


@pytest.mark.parametrize("frame", NOTHING.values(), ids=NOTHING)
async def test_who_says_nothing_again_and_again_is_sent_away(frame: bytes) -> None:
    """And hears why; its calls are given up."""
    both = Greeted()
    both.client.send_headers(1, HEAD)
    both.client.send_headers(3, HEAD)
    both.client.reset_stream(3)
    both.say()
    events = await both.heard(frame * (SPARE // 4))
    if not both.wire.is_ended:  # the lightest
        events = await both.heard(frame * SPARE)

    assert both.wire.is_ended
    assert both.begun[0].task is not None
    assert both.begun[0].task.cancelled()
    (end,) = [each for each in events if isinstance(each, ConnectionTerminated)]
    assert end.error_code == 11


async def test_a_client_that_reads_may_say_so() -> None:
    """For each small message: room for the call and for the connection, and how far is the server;
    however many tokens there are."""
    both = Greeted()
    both.client.send_headers(1, HEAD)
    both.say()
    (call,) = both.begun
    more = struct.pack(">I", 13)
    said = framed(WINDOW_UPDATE, more) + framed(WINDOW_UPDATE, more, stream=1) + ping(1)
    for _ in range(SPARE // 2):
        assert call.write(b"a token.")
        both.server.data_received(said)

    assert not both.wire.is_ended


def test_who_was_silent_may_speak_again() -> None:
    """What was used up comes back with time, and is not gathered beyond what one begins with."""
    calm, now, plain = Calm(0.0), 0.0, Frame(PING, 0, 0, ping(1), True)

    def say(count: int) -> bool:
        for _ in range(count):
            calm.heard(plain)
        return calm.is_kept(now, 0)

    assert say(SPARE)
    assert not say(1)
    now = 10.0
    assert say(1_000)
    now = 10_000.0
    assert say(0)
    assert not say(SPARE + 1)


async def test_room_is_given_to_calls_that_wait_for_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client makes room for every few tokens, and has hundreds of calls that want none."""
    both = Greeted()
    await both.take(calls(500))
    assert len(both.begun) == 500
    pumped: list[Call] = []
    pump = Call.pump

    def noted(call: Call) -> None:
        pumped.append(call)
        pump(call)

    monkeypatch.setattr(Call, "pump", noted)
    slow, late = both.begun[250], both.begun[3]
    assert not slow.write(bytes(66_000))
    assert not late.write(bytes(100))
    pumped.clear()
    room = framed(WINDOW_UPDATE, struct.pack(">I", 100))
    both.server.data_received(room * 50)  # of the connection: the first waits for its own
    assert pumped == [slow, late]
    both.server.data_received(framed(WINDOW_UPDATE, struct.pack(">I", 1_000), stream=501))
    assert pumped == [slow, late, slow]
    both.server.data_received(room)
    assert pumped == [slow, late, slow]
    for end in (Call.lost, lambda call: call.finish(grpc.StatusCode.OK)):
        call = both.begun.pop()
        assert not call.write(bytes(66_000))
        end(call)
        assert not both.server.waiting
