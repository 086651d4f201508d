"""What goes wrong with one link does so with no other, and not for ever."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
from tests.curve_keys import write_keys
from tests.hand_link import HandLink
from tests.own_ports import own_ports
from tests.router.behaviours import Make
from tests.router.builders import BUSY, Stack, beats
from tests.router.fake_cards import fake_card
from tests.waiting import until

from tandem.link.liveness import LinkTimes
from tandem.link.session import LinkState, Terms
from tandem.protocol.card import PROTOCOL_VERSION, WorkerRole
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import new_incarnation
from tandem.protocol.messages import Reset, Welcome, encode
from tandem.router.workers import connection
from tandem.router.workers import dealer as dealers
from tandem.router.workers import discovery as kubernetes
from tandem.router.workers.connection import NO_NOTE, LinkContext
from tandem.router.workers.dealer import Dealer
from tandem.router.workers.discovery import KubernetesDiscovery, PodFacts
from tandem.router.workers.pool import WorkerPool


async def test_a_key_file_that_is_none_ends_no_link(decode: Make, tmp_path: Path) -> None:
    """While it is there: those that are up go on, and one that is lost comes back by the keys that
    were known; a new key is known once its file is right."""
    rings = write_keys(tmp_path, decode=1, router=1)
    secret = rings["decode"].secret
    d1, d2 = decode(curve_secret=secret), decode(curve_secret=secret)
    stack = Stack(curve=rings["router"], beat_timeout=0.5)
    await stack.find(d1, d2)
    peers = tmp_path / "peers"
    (peers / "decode.2.public").write_bytes(b"half a key")
    os.utime(peers, (1, 1))
    d1.silent = True
    await until(lambda: d1.incarnation not in stack.pool.workers)
    d1.silent = False

    await until(lambda: d1.incarnation in stack.pool.workers)
    d2.silent = True
    await until(lambda: d2.incarnation not in stack.pool.workers)
    ring = rings["router"]
    known = ring.public_keys("decode")
    (peers / "decode.2.public").write_bytes(ring.public)
    assert (known, ring.public_keys("decode")) == (known, (ring.public, *known))
    await stack.close()


async def test_keys_that_cannot_be_read_yet_are_waited_for(decode: Make, tmp_path: Path) -> None:
    """With nothing known the link is made later; others are looked for meanwhile."""
    rings = write_keys(tmp_path, decode=1, router=1)
    d = decode(curve_secret=rings["decode"].secret)
    key = tmp_path / "peers" / "decode.1.public"
    whole = key.read_bytes()
    key.write_bytes(whole[:7])
    with pytest.raises(InvalidParameter, match="40 characters"):
        rings["router"].public_keys("decode")
    stack = Stack(curve=rings["router"])
    stack.pool.add(d.endpoint)
    stack.pool.add("127.0.0.1:9")
    stack.pool.reconnect(d.endpoint)
    assert set(stack.pool.links().values()) == {LinkState.DOWN}
    assert stack.pool.refused() == []
    key.write_bytes(whole)

    await until(lambda: d.incarnation in stack.pool.workers)
    await stack.close()


async def test_a_tick_that_fails_is_that_links_alone(
    alert_stack: Stack, decode: Make, caplog: pytest.LogCaptureFixture
) -> None:
    d1, d2 = decode(), decode()
    await alert_stack.find(d1, d2)
    failed = []

    def fail(late: float = 0.0) -> None:
        failed.append(late)
        raise zmq.ZMQError(errno.EMFILE)

    alert_stack.pool._links[d1.endpoint].tick = fail  # type: ignore[method-assign]
    await until(lambda: len(failed) > 3)
    d2.silent = True
    await until(lambda: d2.incarnation not in alert_stack.pool.workers)
    assert "failed to tick" in caplog.text


@pytest.fixture
def narrow() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context with room for a link's sockets, and for no other."""
    with zmq.Context() as made:
        made.set(zmq.MAX_SOCKETS, 3)
        yield made


@pytest.mark.parametrize("others", [1, 2, 3])
async def test_a_link_waits_for_room(
    narrow: zmq.Context[zmq.Socket[bytes]], others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """For all of its sockets: it holds none while it lacks one."""
    held = [narrow.socket(zmq.PAIR) for _ in range(others)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as worker:
        port = worker.bind_to_random_port("tcp://127.0.0.1")
        connected = asyncio.Event()
        dealer = Dealer(
            narrow,
            f"127.0.0.1:{port}",
            received=lambda _: None,
            connected=connected.set,
            disconnected=lambda: None,
        )
        assert "no socket for" in caplog.text
        assert not dealer.send(b"", b"")
        for each in held:
            each.close(0)
        await until(connected.is_set)
        dealer.close()
        dealer.close()


async def test_a_link_that_came_up_by_itself_is_left_alone(
    stack: Stack, decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handshakes failed before, as a process that begins takes calls and drops them: ZMQ's own next
    try gets through, and no other is made."""
    monkeypatch.setattr(dealers, "_RETRY_MAX_MS", 60_000)
    (port,) = own_ports(1)
    with socket.create_server(("127.0.0.1", port)) as early:
        early.settimeout(10)
        stack.pool.add(f"127.0.0.1:{port}")
        dealer = stack.pool._links[f"127.0.0.1:{port}"]._dealer
        dealer._failures = 600  # as after that many; another socket is due in a minute
        while dealer._next_key is None:
            call, _ = await asyncio.to_thread(early.accept)
            call.close()
            await asyncio.sleep(0.05)
    due = dealer._next_key
    d = decode(port=port)
    await until(lambda: d.incarnation in stack.pool.workers)
    worker = stack.pool.workers[d.incarnation]
    own = dealer._socket
    if not due.cancelled():
        due._run()  # the minute is over
    assert dealer._socket is own
    d.load = BUSY
    await beats(stack, d)
    assert stack.pool.workers[d.incarnation] is worker, "it has not been lost meanwhile"
    assert d.num_greeted == 1


class Timers:
    """A loop whose timers are fired by hand."""

    def __init__(self) -> None:
        self.handles: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return 0.0

    def call_later(self, _: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        self.handles.append(asyncio.TimerHandle(0.0, function, (), loop))
        return self.handles[-1]

    def fire(self) -> None:
        """The time of all that are not cancelled has come."""
        handles, self.handles = self.handles, []
        for each in handles:
            if not each.cancelled():
                each._run()


class StubDealer:
    def __init__(self, *_: object, **__: object) -> None:
        self.sent: list[bytes] = []
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def reopen(self) -> None:
        self.is_open = True

    def send(self, header: bytes, payload: bytes) -> bool:
        self.sent.append(payload)
        return True


class Noted:
    def __init__(self) -> None:
        self.ups = self.losses = 0

    def dropped(self, _: str) -> None:
        """Of no interest."""

    def on_up(self, *_: object) -> None:
        self.ups += 1

    def on_lost(self, *_: object) -> None:
        self.losses += 1


@pytest.mark.parametrize("greets_again", [True, False])
async def test_a_greeting_that_was_put_off_ends_no_link(
    monkeypatch: pytest.MonkeyPatch, greets_again: bool
) -> None:
    """The worker refused, and then welcomes all the same, or after ZMQ connected anew."""
    monkeypatch.setattr(connection, "Dealer", StubDealer)
    me, worker = new_incarnation(), new_incarnation()
    terms = Terms(me, "protocol", PROTOCOL_VERSION, LinkTimes(), forgiving=True)
    heard: Any = Noted()
    context = LinkContext(zmq=cast(Any, None), terms=terms, dropped=lambda reason: None)
    link: Any = connection.WorkerConnection(context, "worker:1", heard)
    timers = link._loop = Timers()
    link._greet()
    link._on_frame([HandLink(worker, me).seal(), encode(Reset("not yet"))])
    if greets_again:
        link._greet()
    card = fake_card(WorkerRole.DECODE, worker)
    link._on_frame([HandLink(worker, me).seal(), encode(Welcome(card))])
    assert link.state is LinkState.UP
    timers.fire()

    assert link.state is LinkState.UP
    assert (heard.ups, heard.losses) == (1, 0)
    assert len(link._dealer.sent) == 1 + greets_again


async def test_a_worker_at_two_addresses_keeps_one_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second one would end the first at the worker, and that the second, for ever."""
    monkeypatch.setattr(connection, "Dealer", StubDealer)
    me, worker = new_incarnation(), new_incarnation()
    counter: Any = Noted()
    pool = WorkerPool(me, times=LinkTimes(), counter=counter)
    pool.start(cast(Any, None))
    pool.add("name:1")
    pool.add("alias:1")
    links: list[Any] = list(pool._links.values())
    name, alias = links
    card = fake_card(WorkerRole.DECODE, worker)
    for link in links:
        link._loop = Timers()
        link._greet()
        link._on_frame([HandLink(worker, me).seal(), encode(Welcome(card))])
    states = {"name:1": LinkState.UP, "alias:1": LinkState.DOWN}
    assert (pool.links(), alias._dealer.is_open) == (states, False)
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert warning.getMessage() == "worker at alias:1 is not used: it is the one at name:1"

    name._on_frame([HandLink(worker, me).seal(), encode(Reset("no such link"))])
    assert not pool.workers
    alias._loop.fire()
    name._loop.fire()
    name._on_frame([HandLink(worker, me).seal(), encode(Welcome(card))])
    pool.reconnect("alias:1")
    assert (pool.links(), alias._dealer.is_open) == (states, False)
    name._on_disconnected()
    pool.reconnect("alias:1")
    assert alias._dealer.is_open
    alias._greet()
    alias._on_frame([HandLink(worker, me).seal(), encode(Welcome(card))])
    name._greet()
    name._on_frame([HandLink(worker, me).seal(), encode(Welcome(card))])
    assert not name._dealer.is_open
    pool.remove("alias:1")
    assert name._dealer.is_open
    await pool.close()


async def test_a_second_address_is_looked_up_when_the_first_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by a cluster's discovery, to which both pods are still there."""
    monkeypatch.setattr(connection, "Dealer", StubDealer)
    monkeypatch.setattr(kubernetes, "_core_api", lambda: None)
    monkeypatch.setattr(kubernetes, "PodWatcher", ToldOnce)
    me, worker = new_incarnation(), new_incarnation()
    counter: Any = Noted()
    pool = WorkerPool(me, times=LinkTimes(), counter=counter)
    pool.start(cast(Any, None))
    discovery = KubernetesDiscovery(pool, namespace="n", selector="s", counter=cast(Any, None))
    finding = asyncio.create_task(discovery.run(interval=0.01))
    await until(lambda: len(pool.links()) == 2)
    links: list[Any] = list(pool._links.values())
    name, alias = links
    for link in links:
        link._loop = Timers()
        link._greet()
        welcome = Welcome(fake_card(WorkerRole.DECODE, worker))
        link._on_frame([HandLink(worker, me).seal(), encode(welcome)])
    await asyncio.sleep(0.05)
    assert (name.state, alias._dealer.is_open) == (LinkState.UP, False)
    name._on_disconnected()

    await until(lambda: alias._dealer.is_open)
    assert not finding.done()
    finding.cancel()
    await pool.close()


class ToldOnce:
    """A watcher of pods that has found two, and sees nothing change."""

    def __init__(
        self, _: object, *, on_change: Callable[[kubernetes.Found], None], **__: object
    ) -> None:
        self._told = on_change

    def start(self) -> None:
        pods = [PodFacts(each, "", f"{each}:1", NO_NOTE) for each in ("name", "alias")]
        self._told({f"{each.uid}:1": each for each in pods})

    def stop(self) -> None:
        """Nothing runs."""
