"""The data port of tcp hears anything, and who reads from one is answered anything."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kvtransfer.fuzz.words import fuzzing
from tests.waiting import wait_for

from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.reads import slot_extent
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.transports.tcp_server import (
    ANSWER,
    GREETING,
    MAGIC,
    REQUEST,
    TcpCard,
    decode_card,
    encode_card,
)
from tandem.protocol.ids import Incarnation, new_incarnation

SLOT, SLOTS = 4096, 3
SECONDS = 10.0
_peers = itertools.count()
_EDGE = st.sampled_from(
    [0, 1, SLOT - 1, SLOT, SLOT + 1, SLOTS * SLOT - 1, SLOTS * SLOT, (1 << 32) - 1, 1 << 32]
)
_OFFSET = _EDGE | st.sampled_from([1 << 63, (1 << 64) - 1])


class End:
    """A transport, its slots, and what it counted."""

    def __init__(self, fill: int) -> None:
        self.garbage = 0
        self.memory = SlotMemory(SLOTS, SLOT)
        self.memory.rows.fill_(fill)
        self.transport = TcpTransport(new_incarnation(), host="127.0.0.1", on_garbage=self.count)

    def count(self) -> None:
        self.garbage += 1


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[End, TcpCard]]:
    made = End(7)
    yield made, decode_card(made.transport.serve(made.memory))
    made.transport.stop()


@pytest.fixture(scope="module")
def reader() -> Iterator[End]:
    made = End(0)
    made.transport.receive(made.memory)
    yield made
    made.transport.stop()


def _is_within(offset: int, nbytes: int) -> bool:
    slot, rest = divmod(offset, SLOT)
    return slot < SLOTS and 0 < nbytes <= SLOT - rest


@fuzzing(75)
@given(
    asked=st.lists(st.tuples(_OFFSET, _EDGE.filter(lambda n: n < 1 << 32)), max_size=5),
    at=st.none() | st.integers(0, GREETING.size - 1),
    rest=st.binary(max_size=REQUEST.size - 1),
)
def test_whoever_asks_gets_bytes_of_one_slot_or_is_closed(
    server: tuple[End, TcpCard],
    asked: list[tuple[int, int]],
    at: int | None,
    rest: bytes,
) -> None:
    """A greeting with any byte wrong, places outside of a slot, half a request: what came before is
    answered, the first that is wrong closes the connection and is counted once."""
    end, card = server
    counted = end.garbage
    greeting = bytearray(GREETING.pack(MAGIC, card.incarnation, card.secret))
    if at is not None:
        greeting[at] ^= 1
    right = list(itertools.takewhile(lambda each: _is_within(*each), asked)) if at is None else []
    said = b"".join(REQUEST.pack(*each, n) for n, each in enumerate(asked))
    with socket.create_connection(("127.0.0.1", card.port), timeout=SECONDS) as raw:
        with suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(bytes(greeting) + said + rest)
            raw.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            while data := raw.recv(1 << 16):
                answer += data
    wrong = at is not None or len(right) < len(asked)
    wait_for(lambda: end.garbage == counted + wrong)
    wait_for(lambda: end.transport._server.num_peers == 0)  # type: ignore[union-attr]
    for number, (_, nbytes) in enumerate(right):
        if not answer:
            break  # it was closed for what came behind before this was sent
        assert ANSWER.unpack(answer[: ANSWER.size]) == (number, nbytes)
        assert answer[ANSWER.size :][:nbytes] == b"\7" * nbytes
        answer = answer[ANSWER.size + nbytes :]
    assert answer == b""
    assert (end.memory.rows == 7).all()


@fuzzing(60)
@given(
    heads=st.lists(st.tuples(st.sampled_from([0, 1, 5, 1 << 63]), _EDGE), max_size=3),
    noise=st.binary(max_size=40),
)
@example(heads=[(0, 0)], noise=b"")
@example(heads=[(0, SLOT + 1)], noise=b"x" * (SLOT + 1))
def test_whatever_is_answered_lands_in_the_reads_own_slot(
    reader: End, heads: list[tuple[int, int]], noise: bytes
) -> None:
    """Other tickets, other sizes, more than was asked for, an end in the middle: the read ends, and
    no other slot is written."""
    peer = Incarnation(next(_peers).to_bytes(16, "big"))
    with closing(socket.create_server(("127.0.0.1", 0))) as odd:
        card = TcpCard(odd.getsockname()[1], b"s" * 16, b"i" * 16)
        reader.transport.connect(peer, "127.0.0.1", encode_card(card))
        extent = slot_extent(1, 0, SLOT, slot_bytes=SLOT, remote_slot_bytes=SLOT)
        read = reader.transport.read(peer, [extent])
        odd.settimeout(SECONDS)
        caller, _ = odd.accept()
        with caller, suppress(BrokenPipeError, ConnectionResetError):
            caller.settimeout(SECONDS)
            asked = b""
            while len(asked) < GREETING.size + REQUEST.size:
                asked += caller.recv(1000)
            ticket = REQUEST.unpack(asked[GREETING.size :])[2]
            for shift, nbytes in heads:
                number = (ticket + shift) % (1 << 64)
                caller.sendall(ANSWER.pack(number, nbytes % (1 << 32)) + b"\5" * (nbytes % SLOT))
            caller.sendall(noise)
        seen: list[Progress] = []

        def over() -> bool:
            reader.transport.advance()
            seen.append(reader.transport.poll(read))
            return seen[-1] is not Progress.PENDING

        wait_for(over)
        assert seen[-1] is Progress.FAILED or (0, SLOT) in heads
        reader.transport.close(peer)
    assert not reader.memory.rows[[0, 2]].any()
