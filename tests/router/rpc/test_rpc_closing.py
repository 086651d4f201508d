"""How connections close: the client hears the last words, whatever it says meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from h2.events import ConnectionTerminated, Event
from tests.router.rpc.raw_client import RawClient, asked
from tests.router.rpc.test_rpc_connection import Wire
from tests.waiting import wait_for

from tandem.router import closing
from tandem.router.closing import LINGER_BYTES, Closing
from tandem.router.rpc.server import Server

PING = b"\0\0\x08\x06" + bytes(13)
MANY_PINGS = PING * 20_000
"""Longer than what a server reads at once, shorter than what it reads of who has been told."""


def refuse(client: RawClient) -> None:
    """Give up so many calls that the server takes leave."""
    with client.at_once():
        for _ in range(150):
            client.h2.reset_stream(client.ask(asked()))


def is_told(event: Event) -> bool:
    """Whether the server has taken leave."""
    return isinstance(event, ConnectionTerminated)


def test_who_is_sent_away_hears_why_whatever_it_goes_on_to_say(
    raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window has room for nothing when the server says so, and it has said more that the server
    never read: a connection that is closed then is reset, and its last words are lost."""
    monkeypatch.setattr(closing, "LINGER_SECONDS", 30.0)
    served, other = raw()
    client = RawClient(other.socket.getpeername()[1], receive_buffer=2_048).greet()
    client.socket.sendall(PING * 2_000)
    refuse(client)
    client.socket.sendall(MANY_PINGS)
    rpc: Server = served.app.state.rpc
    wait_for(lambda: [each.is_idle() for each in list(rpc._connections) if each._last] == [False])
    end: Any = client.until(is_told)

    assert end.error_code == 11
    client.socket.close()


def test_a_router_that_stops_waits_for_its_last_words(raw: Any) -> None:
    """Who is slow to leave is let finish reading; nobody for longer than a while."""
    served, client = raw(drain_timeout=0.2)
    client.greet()
    assert client.status(client.ask(asked()))[0] == "0"
    rpc: Server = served.app.state.rpc
    assert len(rpc._connections) == 1
    served.stop()

    assert not rpc._connections
    assert client.until(is_told) is not None


def test_who_has_been_told_makes_room_for_others(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stays all the same holds no place against others."""
    monkeypatch.setattr(closing, "LINGER_SECONDS", 60.0)
    served, client = raw(max_connections=2)
    port = client.socket.getpeername()[1]
    client.greet()
    refuse(client)
    assert client.until(is_told) is not None
    rpc: Server = served.app.state.rpc
    wait_for(lambda: any(each.is_lingering() for each in rpc._connections))
    first, second = RawClient(port).greet(), RawClient(port).greet()

    assert first.status(first.ask(asked()))[0] == "0"
    assert second.status(second.ask(asked()))[0] == "0"
    first.socket.close()
    second.socket.close()


def test_who_is_told_to_leave_makes_room_once(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the one that came then: it lingers on, and the next one has another leave."""
    monkeypatch.setattr(closing, "LINGER_SECONDS", 60.0)
    served, client = raw(max_connections=2, header_timeout=60.0)
    port = client.socket.getpeername()[1]
    clients = [client.greet(), *(RawClient(port).greet() for _ in range(20))]
    assert clients[-1].status(clients[-1].ask(asked()))[0] == "0"
    rpc: Server = served.app.state.rpc
    stay = [each for each in list(rpc._connections) if not each.is_lingering()]
    assert len(stay) <= 2
    assert len(rpc._connections) <= 3
    for each in clients:
        each.socket.close()


async def test_who_does_not_leave_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, which begins when all that was written has gone."""
    monkeypatch.setattr(closing, "LINGER_SECONDS", 0.01)
    wire = Wire()
    wire.unsent = 1_000
    end = Closing(wire, 60.0)
    end.begin()
    assert wire.is_ended
    assert wire.is_read
    await asyncio.sleep(0.1)
    assert not wire.is_closed
    wire.unsent = 0
    async with asyncio.timeout(10):
        await wire.closed.wait()


async def test_who_goes_on_and_on_is_left() -> None:
    """What is read for nothing is bounded."""
    wire = Wire()
    end = Closing(wire, 60.0)
    end.begin()
    for _ in range(LINGER_BYTES >> 16):
        end.heard(1 << 16)
    assert not wire.is_closed
    end.heard(1)
    assert wire.is_closed
    end.lost()


async def test_who_is_gone_is_not_waited_for() -> None:
    """Its end cannot be closed by halves."""

    class Gone(Wire):
        def write_eof(self) -> None:
            raise OSError("not connected")

    wire = Gone()
    end = Closing(wire, 60.0)
    end.begin()
    assert wire.is_closed
    assert end._linger is None
