"""Links to workers over real sockets: greeting, loss, garbage, peers; and who counts as alive."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from tests.curve_keys import write_keys
from tests.hand_link import HandLink
from tests.own_ports import own_ports
from tests.router.builders import Stack, beats, inc, make_request, tokens_of
from tests.router.fake_worker import FakeWorker, Turn
from tests.waiting import until

from tandem.link.session import LinkState
from tandem.protocol.card import WorkerRole
from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.errors import RequestFailed
from tandem.protocol.ids import BlockHash
from tandem.protocol.messages import Draining, ReplyTo, Reset, Welcome, encode
from tandem.protocol.outputs import Accepted, BlockEvents
from tandem.router.workers.discovery import StaticDiscovery

Make = Callable[..., FakeWorker]
ANSWER = list(range(100, 108))


async def test_peers_are_told_to_decode_workers(stack: Stack, prefill: Make, decode: Make) -> None:
    """Whenever the set changes, and only those whose KV fits."""
    p1, p2, other = prefill(), prefill(), prefill(revision="r2")
    d = decode()
    await stack.find(p1, p2, other, d)
    await until(lambda: len(d.peers) == 2)

    assert d.peers == {p.card.control: p.incarnation for p in (p1, p2)}
    p1.stop()
    await until(lambda: len(d.peers) == 1)
    assert d.peers == {p2.card.control: p2.incarnation}


async def test_successor_at_the_same_address(stack: Stack, decode: Make) -> None:
    """A process that takes over an address is another worker; the old one's keys fail."""
    d = decode(port=own_ports(1)[0])
    await stack.find(d)
    d.stop()
    await until(lambda: not stack.pool.workers)
    successor = decode(port=d.port)
    await until(lambda: successor.incarnation in stack.pool.workers)

    assert tokens_of(await stack.run(make_request())) == ANSWER


def garbage(worker: FakeWorker) -> list[list[bytes]]:
    header = HandLink(worker.incarnation).seal()
    return [
        [b""],
        [b"x" * 44, b"y"],
        [header],
        [header, b"", b""],
        [b"\x00" * 200, encode(Reset("no"))],
    ]


async def test_garbage_is_counted_and_dropped(stack: Stack, decode: Make) -> None:
    """Random bytes end neither the link nor a request on it."""
    d = decode(step=0.01)
    await stack.find(d)
    running = asyncio.create_task(stack.run(make_request()))
    for parts in garbage(d):
        d.send_raw(parts)

    assert tokens_of(await running) == ANSWER
    await until(lambda: stack.metric("tandem:router_frames_dropped_total", reason="garbage") == 5)
    assert d.incarnation in stack.pool.workers


async def test_streams_have_their_turns_between_large_frames(
    stack: Stack, decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker whose cache goes at once: many of them wait in its socket."""
    d = decode()
    await stack.find(d)
    loop, rounds = asyncio.get_running_loop(), 0
    at: list[int] = []
    monkeypatch.setattr(stack.fleet.index, "apply", lambda *_: at.append(rounds))

    def count() -> None:
        nonlocal rounds
        rounds += 1
        loop.call_soon(count)

    count()
    for _ in range(12):
        d.tell_blocks(BlockEvents(removed=(BlockHash(b"r" * 16),) * (1 << 14)))
    loop.call_soon(time.sleep, 0.2)  # the loop is held: all of them are there
    await until(lambda: len(at) == 12)
    # Two in a round where the socket was empty between them, as on a machine that is late.
    assert max(Counter(at).values()) <= 2


async def test_a_turn_that_is_due_is_the_only_one(
    stack: Stack, decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives while frames wait made turns of its own, which made others: the more there was
    to read, the more of it was read at once."""
    await stack.find(decode())
    (link,) = stack.pool._links.values()
    dealer, turns = link._dealer, 0

    class Full:
        def getsockopt(self, _: int) -> int:
            return zmq.POLLIN

    def drain(_socket: object, _limit: int) -> bool:
        nonlocal turns
        turns += 1
        return True

    with monkeypatch.context() as full:
        full.setattr(dealer, "_socket", Full())
        full.setattr(dealer, "_drain", drain)
        for round_of_loop in range(1, 4):
            for _ in range(3):
                dealer._on_readable()
            assert turns == round_of_loop
            await asyncio.sleep(0)


async def test_what_was_known_of_a_worker_goes_though_nobody_has_news(stack: Stack) -> None:
    """A router's last worker is gone, and its blocks' memory soon."""
    stack.fleet.index.apply(inc(1), BlockEvents(stored=(BlockHash(b"s" * 16),)))
    stack.fleet.index.drop(inc(1))
    await until(lambda: not stack.fleet.index._leaving)


async def test_undecodable_payload_in_a_good_frame(stack: Stack, decode: Make) -> None:
    """It counts as a frame of the link, says nothing, and breaks nothing."""
    d = decode()
    await stack.find(d)
    d.send_sealed(b"\xc1")

    await until(lambda: stack.metric("tandem:router_frames_dropped_total", reason="garbage"))
    assert tokens_of(await stack.run(make_request())) == ANSWER


async def test_lost_frame_resets_the_link(stack: Stack, decode: Make) -> None:
    """A gap in the sequence: RESET, all keys fail, HELLO, and on it goes where it was."""
    d = decode(step=0.02)
    await stack.find(d)
    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: d.submitted)
    d.skip_sequence()

    assert tokens_of(await running) == ANSWER
    assert d.resets == ["a frame was lost or misdirected"]
    assert len(d.submitted) == 2
    assert stack.metric("tandem:router_attempt_failures_total", kind="failed", reason="worker_lost")


async def test_frame_for_another_router(stack: Stack, decode: Make) -> None:
    """A wrong destination is a lost frame."""
    d = decode()
    await stack.find(d)
    d.send_raw([HandLink(d.incarnation, d.incarnation).seal(), encode(Draining(1))])

    await until(lambda: d.resets)
    await until(lambda: d.incarnation in stack.pool.workers)
    assert not stack.pool.workers[d.incarnation].draining


async def test_frame_of_another_process(stack: Stack, decode: Make) -> None:
    """A new incarnation on the same connection: the old worker is lost."""
    d, other = decode(), decode()
    await stack.find(d)
    router = stack.pool.me
    d.send_raw([HandLink(other.incarnation, router).seal(), encode(Draining(1))])

    await until(lambda: stack.metric("tandem:router_frames_dropped_total", reason="reset"))
    await until(lambda: d.incarnation in stack.pool.workers)
    assert other.incarnation not in stack.pool.workers


async def test_worker_says_reset(stack: Stack, decode: Make) -> None:
    d = decode()
    await stack.find(d)
    d.send_now(Reset("I forgot you"))

    await until(lambda: d.num_greeted == 2)
    await until(lambda: d.incarnation in stack.pool.workers)
    assert tokens_of(await stack.run(make_request())) == ANSWER


async def test_unexpected_messages_are_counted(stack: Stack, decode: Make) -> None:
    """A second WELCOME, a reply to nothing, words about unknown keys."""
    d = decode()
    await stack.find(d)
    turn = Turn(d, stack.pool.me, make_request())
    d.send_now(Welcome(d.card))
    d.send_now(ReplyTo(Reply(id=77, ok=True)))
    d.do(lambda: turn.say(accepted=(Accepted("ghost", 0),)))

    name = "tandem:router_frames_dropped_total"
    await until(lambda: stack.metric(name, reason="stale") == 2)
    assert stack.metric(name, reason="unexpected") == 1


async def test_draining_worker_gets_nothing_new(stack: Stack, decode: Make) -> None:
    d1, d2 = decode(step=0.02), decode(step=0.001)
    await stack.find(d1)
    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: d1.submitted)
    await stack.find(d1, d2)
    d1.send_now(Draining(1000))
    await until(lambda: stack.pool.workers[d1.incarnation].draining)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert tokens_of(await running) == ANSWER
    assert (len(d1.submitted), len(d2.submitted)) == (1, 1)


async def test_draining_by_load_report(stack: Stack, decode: Make) -> None:
    d = decode()
    await stack.find(d)
    d.load = replace_load(d, draining=True)
    await beats(stack, d)

    assert stack.pool.up(WorkerRole.DECODE) == []


def replace_load(worker: FakeWorker, **fields: object):
    import msgspec

    return msgspec.structs.replace(worker.load, **fields)


async def test_stalled_worker_is_lost(stack: Stack, decode: Make) -> None:
    """Beats without progress while work is pending are no life."""
    d = decode()
    await stack.find(d)
    d.has_work = True

    await until(lambda: d.num_greeted == 2)
    d.has_work = False
    await until(lambda: d.incarnation in stack.pool.workers)
    assert tokens_of(await stack.run(make_request())) == ANSWER


async def test_unusable_cards(stack: Stack, decode: Make, make_worker: Make) -> None:
    """No role, another protocol: not placed upon. The same worker twice: one link is kept."""
    d = decode()
    d.card = msgspec_replace(d.card, role=None)
    other = decode()
    fingerprint = msgspec_replace(other.card.fingerprint, version=99)
    other.card = msgspec_replace(other.card, fingerprint=fingerprint)
    good = decode()
    for worker in (d, other):
        stack.pool.add(worker.endpoint)
    await stack.find(good)
    alias = good.endpoint.replace("127.0.0.1", "localhost")
    stack.pool.add(alias)
    await until(lambda: stack.pool._parked == {alias: good.endpoint})
    await until(lambda: [*stack.pool.links().values()] == [LinkState.UP] * 3 + [LinkState.DOWN])

    await until(lambda: list(stack.pool.workers) == [good.incarnation])
    stack.pool.remove(alias)
    assert list(stack.pool.workers) == [good.incarnation]


def msgspec_replace(value, **fields):
    import msgspec

    return msgspec.structs.replace(value, **fields)


async def test_calls(alert_stack: Stack, decode: Make) -> None:
    """A command that is not answered, or cannot be sent, fails in time."""
    d = decode()
    await alert_stack.find(d)
    connection = alert_stack.pool.workers[d.incarnation].connection
    d.silent = True
    command = Command(id=1, name=CommandName.STATS)

    with pytest.raises(RequestFailed, match="did not answer"):
        await connection.call(command, 0.05)
    waiting = asyncio.create_task(connection.call(command, 5.0))
    with pytest.raises(RequestFailed, match="silent"):
        await waiting
    with pytest.raises(RequestFailed, match="not connected"):
        await connection.call(command, 5.0)
    assert not connection.submit(make_request(), None)  # type: ignore[arg-type]
    connection.send_peers({})


async def test_nobody_answers_hello(alert_stack: Stack) -> None:
    """Something listens and speaks ZMQ, but not this protocol: tried again, for ever."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    alert_stack.pool.add(f"127.0.0.1:{port}")
    greeted: set[bytes] = set()

    def greet_twice() -> bool:
        while router.poll(0):
            greeted.add(router.recv_multipart()[0])
        return len(greeted) == 2

    await until(greet_twice)
    assert alert_stack.pool.links() == {f"127.0.0.1:{port}": LinkState.GREETING}
    assert not alert_stack.pool.workers
    router.close(0)
    context.term()


async def test_discovery(stack: Stack, decode: Make) -> None:
    """Addresses of the list are added once, and looked up anew while they are down."""
    d = decode()
    nobody = "127.0.0.1:9"
    again: list[str] = []
    reconnect = stack.pool.reconnect

    def noted(endpoint: str) -> None:
        again.append(endpoint)
        reconnect(endpoint)

    stack.pool.reconnect = noted  # type: ignore[method-assign]
    discovery = StaticDiscovery(stack.pool, [d.endpoint, nobody, d.endpoint])
    task = asyncio.create_task(discovery.run(0.05))
    links = {d.endpoint: LinkState.UP, nobody: LinkState.DOWN}
    await until(lambda: nobody in again)
    await until(lambda: d.incarnation in stack.pool.workers and stack.pool.links() == links)
    task.cancel()
    stack.pool.reconnect("127.0.0.1:8")
    stack.pool.remove("127.0.0.1:8")


async def test_curve_needs_a_worker_with_the_key(make_worker: Make, tmp_path: Path) -> None:
    ring = write_keys(tmp_path, router=1, decode=1)["router"]
    d = make_worker(WorkerRole.DECODE)
    stack = Stack(curve=ring)
    stack.pool.add(d.endpoint)
    assert not await stack.pool.wait_change(0.3)
    assert not stack.pool.workers
    await stack.close()
    await stack.close()


async def test_a_tick_that_comes_late_says_so(alert_stack: Stack, decode: Make) -> None:
    """And its lateness is taken off a worker's silence, whose frames are still unread."""
    d = decode()
    await alert_stack.find(d)
    connection = alert_stack.pool._links[d.endpoint]
    lates: list[float] = []
    tick = connection.tick

    def unheard(late: float = 0.0) -> None:
        connection._session.alive._received_at = connection._loop.time() - late
        lates.append(late)
        tick(late)

    connection.tick = unheard  # type: ignore[method-assign]
    time.sleep(1.0)  # noqa: ASYNC251  (the loop stands still for longer than a worker may)
    await until(lambda: len(lates) >= 2)

    assert lates[0] > 0.5
    assert connection.state is LinkState.UP
    assert d.num_greeted == 1
