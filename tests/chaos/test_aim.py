"""What aims at pulls finds their frames and no others, once, and lets go of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
from tests.chaos.aim import BY_BLOCKS, BY_SLOTS, Aim, Aims, fits, frames_of, moments_of, pull_of
from tests.chaos.commands import main
from tests.chaos.faults import Claims, Hand
from tests.chaos.load import Clients
from tests.chaos.proxy import ADVERTISED, LISTENED, Proxy
from tests.chaos.schedule import (
    AGENT_KINDS,
    KV,
    PULL_KINDS,
    Ask,
    Fault,
    Kind,
    Question,
    make_schedule,
)
from tests.waiting import until, wait_for

from tandem.cli.ports import free_ports
from tandem.kvtransfer.handoff.form import WireDtype
from tandem.kvtransfer.handoff.manifest import Item
from tandem.kvtransfer.handoff.messages import (
    Committed,
    Done,
    Final,
    Message,
    Open,
    Part,
    Ready,
    Taken,
    Want,
)
from tandem.protocol.ids import NOBODY, BlockHash, RequestKey
from tandem.protocol.layout import KVKind
from tandem.protocol.link import write_header

KEY = RequestKey(b"r" * 16, "a", 0)
PULL = KEY.for_pull
ITEM = Item(0, KVKind.FULL, 0, 16)


def messages(key: RequestKey) -> list[Any]:
    """One of each kind, in the order of ``BY_SLOTS``."""
    return [
        Open(key, 50, (BlockHash(bytes(16)),)),
        Ready(key, 16, 16, (ITEM,)),
        Want(key, 0, 4, (8,), 16, WireDtype.AUTO),
        Part(key, 0, 0, 16, 3, 1280),
        Taken(key, 0),
        Final(key, ()),
        Done(key, ok=True),
        Committed(key),
    ]


def unit_of(message: Message) -> bytes:
    """As ZMQ writes it."""
    parts = [write_header(NOBODY, NOBODY, 0), msgspec.msgpack.encode(message)]
    flags = [1, 0]
    return b"".join(
        bytes([more | 2]) + len(part).to_bytes(8, "big") + part
        if len(part) > 255
        else bytes([more, len(part)]) + part
        for more, part in zip(flags, parts, strict=True)
    )


def test_frames_of_pulls_are_told_from_all_else() -> None:
    """By their key: the same of a hand-off are let be."""
    assert len(frames_of(unit_of(Committed(PULL)))) == 2
    for moment, message in zip(BY_SLOTS, messages(PULL), strict=True):
        assert pull_of(unit_of(message)) == message
        assert [each for each in BY_SLOTS if fits(message, each)] == [moment]
    assert [fits(each, KV) for each in messages(PULL)].count(True) == 1
    assert fits(Ready(PULL, 16, 16, (ITEM,), ((4,),)), KV)
    assert not any(pull_of(unit_of(each)) for each in messages(KEY))
    assert pull_of(b"\x00\x03abc") is None
    assert (moments_of("tcp"), moments_of("shm_agent")) == (BY_SLOTS, BY_BLOCKS)


def test_an_aim_takes_one_frame_of_a_holder_that_may_be_hurt() -> None:
    """Two that wait for the same take one each; who has waited in vain takes none."""
    claims, aims = Claims(), Aims()
    first, second = Aim("open", claims.take), Aim("open", claims.take)
    frame = unit_of(messages(PULL)[0])
    assert aims.take(frame, "a") is None
    aims.add(first)
    aims.add(second)
    held = aims.take(frame, "a")
    assert held is not None
    assert (held.holder, first.held, second.held) == ("a", held, None)
    assert aims.take(frame, "a") is None, "it is hurt already"
    claims.give("a")
    assert second.wait(0.0) is None
    assert aims.take(frame, "a") is None
    assert claims.take("a"), "nobody claimed it in vain"


@pytest.mark.parametrize("released", [True, False])
def test_a_proxy_holds_the_frame_and_what_follows_it(
    *, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is released, or for as long as a frame is held at most; all passes, in order."""
    monkeypatch.setattr("tests.chaos.aim.HOLD_SECONDS", 60.0 if released else 0.2)
    control, data = free_ports(2)
    aims = Aims()
    proxy = Proxy(control, data, 1, name="decode-1", aims=aims)
    proxy.start()
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(f"tcp://{LISTENED}:{control}")
    dealer.connect(f"tcp://{ADVERTISED}:{control}")
    aim = Aim("done")
    aims.add(aim)
    sent = [msgspec.msgpack.encode(each) for each in messages(PULL)]
    try:
        for each in sent:
            dealer.send_multipart([write_header(NOBODY, NOBODY, 0), each])
        held = wait_for(lambda: aim.held)
        assert held.holder == "decode-1"
        got = [router.recv_multipart()[-1] for _ in range(6)]
        if released:
            assert not router.poll(100)
            held.release()
        got += [router.recv_multipart()[-1] for _ in range(2)]
        assert got == sent
    finally:
        context.destroy(linger=0)
        proxy.stop()


def test_faults_of_pulls_are_in_a_schedule_that_asks_for_them() -> None:
    """At each frame, bits only where KV lies; the agent is hurt as workers are; and requests are
    those of any schedule of pulls."""
    plain = make_schedule(7, 4000, pulls=True)
    more = make_schedule(
        7,
        4000,
        every=5,
        pulls=True,
        kinds=(Kind.KILL, *PULL_KINDS),
        moments=BY_BLOCKS,
        agents=True,
    )
    assert (more.asks, more.questions) == (plain.asks, plain.questions)
    aimed = [fault for fault in more.faults if fault.kind in PULL_KINDS]
    assert {fault.kind for fault in aimed} == set(PULL_KINDS)
    assert {fault.role for fault in aimed if fault.kind is Kind.PULL_FLIP} == {KV}
    assert {fault.role for fault in aimed if fault.kind is Kind.PULL_KILL} == set(BY_BLOCKS)
    assert any(fault.role == "agent" for fault in more.faults if fault.kind in AGENT_KINDS)
    assert not any(fault.role == "agent" for fault in plain.faults)
    assert str(Fault(3, Kind.PULL_STOP, "final", 0, 1.0)) == "#3 pull-stop final for 1.0 s"


class Blows:
    """Strikes at every second fault."""

    def __init__(self) -> None:
        self.left = 0

    async def strike(self, fault: Fault, claims: Claims, leave: Callable[[], int]) -> float | None:
        """See ``faults.Aimed``."""
        self.left += leave()
        return time.monotonic() if fault.at % 2 else None


def test_the_hand_leaves_pulls_to_who_aims_at_them() -> None:
    """And says which it hurt, and which never came."""
    faults = [Fault(at, Kind.PULL_KILL, "open", 0, 1.0) for at in (1, 2)]
    blows = Blows()

    async def run() -> Hand:
        hand = Hand(faults, processes=None, aimed=blows, leave=lambda: 3)  # type: ignore[arg-type]
        hand.sending(5)
        await hand.mended()
        return hand

    hand = asyncio.run(run())
    assert list(hand.struck) == [str(faults[0])]
    assert hand.skipped == [str(faults[1])]
    assert blows.left == 6


def test_clients_that_have_heard_nothing_can_leave() -> None:
    """Their answers are those of clients who left, not of a server that hangs."""
    heard = threading.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        heard.set()
        await reader.read()
        writer.close()

    async def run() -> tuple[bool, bool, int]:
        server = await asyncio.start_server(serve, LISTENED, 0)
        port = server.sockets[0].getsockname()[1]
        async with Clients(f"http://{LISTENED}:{port}", "m", at_once=2, deadline=30.0) as clients:
            assert clients.leave() == 0
            question = Question("hello", 4, 0.0, 1, 1, None)
            asking = asyncio.create_task(clients.ask(Ask(1, 0, True, None), question))
            await until(heard.is_set)
            count = clients.leave()
            answer = await asking
            assert clients.leave() == 0
        server.close()
        return answer.left, answer.hung, count

    assert asyncio.run(run()) == (True, False, 1)


def test_aims_without_pulls_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """By name: such a run would hurt nothing that it says."""
    with pytest.raises(SystemExit):
        main(["line", "--aimed"])
    assert "--aimed" in capsys.readouterr().err
