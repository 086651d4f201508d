"""A node's agent and its callers: any packets, with anything beside them, from either end."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kvtransfer.agent.agents import AgentWorker, Running
from tests.kvtransfer.fuzz.test_fuzz_descriptors import KINDS, descriptors
from tests.kvtransfer.fuzz.words import NUMBER, ODD, Spoil, fuzzing
from tests.kvtransfer.mapped.test_mapped import block, ended
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES
from tests.waiting import wait_for

from tandem.kvtransfer.nodeagent import server
from tandem.kvtransfer.transports.agent import wire
from tandem.kvtransfer.transports.agent.wire import encode
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.mapped.wire import COPYING, key_for, place_of
from tandem.memory.shared import SharedMemory

SECONDS = 10.0
SLOTS = 4
ME = b"c" * 16
FRESH = b"n" * 32
SECRET = b"s" * 32


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short name: that of a socket is bounded."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """The agent that hears all of it."""
    made = Running(folder)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def producer(running: Running, folder: Path) -> Iterator[AgentWorker]:
    """Whose blocks are sevens, and who is registered."""
    made = AgentWorker(folder, 7)
    made.card = wire.decode_card(made.serve())  # type: ignore[attr-defined]
    yield made
    assert (made.kv_cache == 7).all()
    made.transport.stop()


def call(folder: Path) -> socket.socket:
    return called(folder)[0]


def called(folder: Path) -> tuple[socket.socket, bytes]:
    """The same, and the agent's fresh bytes."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(SECONDS)
    sock.connect(str(folder / wire.SOCKET_NAME))
    hello = wire.to_worker.decode(sock.recv(wire.MAX_MESSAGE))
    assert isinstance(hello, wire.Hello)
    return sock, hello.challenge


def heard(sock: socket.socket) -> Any:
    """The next message, None at the end."""
    try:
        data = sock.recv(wire.MAX_MESSAGE)
    except ConnectionResetError:
        return None
    return wire.to_worker.decode(data) if data else None


def spoiled(message: Any, spoil: Spoil | None, at: int, value: Any) -> bytes:
    """A message's bytes, with one thing wrong."""
    data = encode(message)
    place = at % len(data)
    if spoil is Spoil.CUT:
        return data[: max(1, place)]
    if spoil is Spoil.FLIP:
        return data[:place] + bytes([data[place] ^ (1 + at % 255)]) + data[place + 1 :]
    if spoil is Spoil.LONG:
        return data + bytes(wire.MAX_MESSAGE)
    if spoil is Spoil.NOISE:
        return bytes((at * each) % 251 for each in range(1, 2 + at % 80))
    if spoil is Spoil.FIELD:
        fields = msgspec.msgpack.decode(data)
        fields[at % len(fields)] = value
        return msgspec.msgpack.encode(fields)
    return data


_ID = st.sampled_from([ME, b"x" * 16, b"", b"y" * 17])
_LONG = st.sampled_from([FRESH, b"x" * 32, b"", b"y" * 33])
_SIZE = NUMBER | st.sampled_from([BYTES, BLOCKS * BYTES, SLOTS * BYTES])
_GIVE = st.builds(
    wire.Give,
    st.sampled_from([2, 2, 2, 1, 3]),
    _ID,
    _LONG,
    st.tuples(_SIZE, _SIZE, _SIZE),
    _SIZE,
    st.sampled_from(["host", "host", "GPU-none", "", "x" * 65]),
)
_TAKE = st.builds(
    wire.Take,
    st.sampled_from([2, 2, 2, 1, 3]),
    _ID,
    _SIZE,
    NUMBER,
    _SIZE,
    st.sampled_from(["host", "host", "GPU-none"]),
    _LONG,
)
_COPY = st.builds(
    wire.Copy,
    NUMBER,
    _ID,
    _LONG,
    _ID,
    st.sampled_from(wire.Ground),
    st.lists(NUMBER, max_size=4).map(tuple),
    NUMBER,
    NUMBER,
)


@pytest.mark.full
@fuzzing(60)
@given(
    messages=st.lists(
        st.tuples(
            _GIVE | _TAKE | _COPY | st.just(wire.Status()),
            st.none() | st.sampled_from(Spoil),
            st.integers(0, 300),
            st.sampled_from(ODD),
            st.lists(st.sampled_from(sorted(KINDS)), max_size=5),
        ),
        min_size=1,
        max_size=4,
    )
)
@example(messages=[(wire.Take(2, ME, 1 << 40, 256, 1, "host", FRESH), None, 0, None, ["kv_cache"])])
@example(
    messages=[(wire.Give(2, ME, FRESH, (1 << 47,) * 3, 1, "host"), None, 0, None, ["kv_cache"] * 3)]
)
@example(messages=[(wire.Give(2, ME, FRESH, (1, 1, 1), 1, "host"), None, 0, None, ["pipe"] * 3)])
@example(messages=[(wire.Take(2, ME, 4096, 1, 1, "host", FRESH), None, 0, None, ["unsealed"])])
def test_whatever_callers_say_the_agent_goes_on(
    running: Running, producer: AgentWorker, folder: Path, messages: list[Any]
) -> None:
    """Each caller is answered or closed, nothing stays open, and the next one is served."""
    before = descriptors()
    with closing(call(folder)) as sock:
        for message, spoil, at, value, kinds in messages:
            files = [KINDS[kind]() for kind in kinds]
            with suppress(BrokenPipeError, ConnectionResetError, OSError):
                socket.send_fds(sock, [spoiled(message, spoil, at, value)], files)
            for each in files:
                os.close(each)
        sock.shutdown(socket.SHUT_WR)
        while heard(sock) is not None:
            pass
    with closing(call(folder)) as sock:
        sock.send(encode(wire.Status()))
        counts = heard(sock).counts
    assert (counts["producers"], counts["consumers"]) == (1, 0)
    wait_for(lambda: descriptors() <= before, seen=lambda: descriptors() - before)


_SECRET = st.sampled_from([None, None, None, b"wrong" + bytes(27)])
_NAMES = st.sampled_from([None, None, None, b"unknown" + bytes(9)])


@fuzzing(75)
@given(
    name=_NAMES,
    secret=_SECRET,
    consumer=st.sampled_from([ME, ME, ME, b"stale" + bytes(11)]),
    ground=st.sampled_from(wire.Ground),
    places=st.lists(
        st.integers(0, BLOCKS).map(lambda at: at * BYTES) | NUMBER, min_size=1, max_size=4
    ),
    size=st.sampled_from([BYTES, BYTES, BYTES, 1, 3 * BYTES, 1 << 47]),
    slot=st.integers(0, SLOTS + 1) | st.just(255),
)
def test_no_request_writes_outside_its_slot(
    running: Running, producer: AgentWorker, folder: Path, name: Any, secret: Any, **more: Any
) -> None:
    """Unknown producers, wrong secrets, stale names, places and slots beyond the end: refused with
    what is wrong, counted, and nothing is written; else the slot has the producer's bytes."""
    card = producer.card  # type: ignore[attr-defined]
    more["places"] = tuple(more["places"])
    name_there = name or card.incarnation
    memory = SharedMemory.make(SLOTS * 2 * BYTES)
    view = memory.map()
    view[:] = b"\1" * len(view)
    sock, challenge = called(folder)
    key = key_for(secret or card.secret, COPYING)
    connection = wire.Connection(challenge, FRESH)
    proof = wire.consumers_proof(key, connection, name_there, more["consumer"])
    request = wire.Copy(number=9, producer=name_there, proof=proof, **more)
    with closing(sock), closing(memory):
        said = wire.Take(2, ME, 2 * BYTES, SLOTS, BYTES, "host", FRESH)
        socket.send_fds(sock, [encode(said)], [memory.descriptor])
        assert isinstance(heard(sock), wire.Registered)
        counted = running.agent.counts.copy()
        sock.send(encode(request))
        answer = heard(sock)
    length, begin = len(request.places) * request.size, request.slot * 2 * BYTES
    if isinstance(answer, wire.Copied):
        tags = 16 * len(request.places) if request.ground is wire.Ground.BLOCKS else 0
        assert (answer.number, len(answer.tags)) == (9, tags)
        assert answer.proof == wire.agents_proof(key, connection, request, answer.tags)
        assert length <= 2 * BYTES
        assert (name, secret, request.consumer) == (None, None, ME)
        filled = 7 if request.ground is wire.Ground.BLOCKS else 0
        assert view[begin : begin + length] == bytes([filled]) * length
        view[begin : begin + length] = b"\1" * length
    else:
        assert isinstance(answer, wire.Refused)
        counter = f"refused: {answer.fault.name.lower()}"
        assert running.agent.counts[counter] == counted[counter] + 1
        expected = (
            (request.consumer != ME, wire.Fault.STALE),
            (name is not None, wire.Fault.UNKNOWN),
            (secret is not None, wire.Fault.DENIED),
            (True, wire.Fault.OUTSIDE),
        )
        assert answer.fault is next(fault for holds, fault in expected if holds)
    assert view[:] == b"\1" * len(view)
    view.close()


def test_who_says_nothing_or_hears_nothing_is_let_go_of(
    running: Running, producer: AgentWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence before a registration ends; and who sends requests without reading the answers is not
    heard on, so that what is kept for it has a bound, while others are served."""
    monkeypatch.setattr(server, "GREETING_SECONDS", 0.2)
    counted = running.agent.counts["garbage"]
    with closing(call(folder)) as sock:
        assert heard(sock) is None
        assert running.agent.counts["garbage"] == counted + 1
    monkeypatch.undo()
    memory = SharedMemory.make(BYTES)
    memory.map()[:] = bytes([1]) * BYTES
    with closing(call(folder)) as deaf, closing(memory):
        take = wire.Take(2, ME, BYTES, 1, BYTES, "host", FRESH)
        socket.send_fds(deaf, [encode(take)], [memory.descriptor])
        stale = wire.Copy(1, ME, FRESH, b"z" * 16, wire.Ground.BLOCKS, (0,), BYTES, 0)
        deaf.setblocking(False)
        for _ in range(100_000):
            try:
                deaf.send(encode(stale))
            except BlockingIOError:
                break
        assert running.agent.counts["refused: stale"] < 50_000
        with closing(call(folder)) as sock:
            sock.send(encode(wire.Status()))
            assert heard(sock).counts["consumers"] == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("user", "more", "may"),
    [
        (65534, ["65534"], False),
        (65534, ["4321"], True),
        (65534, ["65534", "beside"], True),
        (0, ["0"], True),
    ],
)
def test_only_this_user_and_the_group_may_call(user: int, more: list[str], may: bool) -> None:
    """The socket's mode keeps others out; and where it does not, who calls is asked."""
    program = """
import os, socket, sys
os.setgroups([4321] if sys.argv[4:] else []), os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
print(len(sock.recv(100)))
"""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        os.chmod(name, 0o755)
        running = Running(Path(name), 4321)
        words = [sys.executable, "-c", program, str(running.agent.path), str(user), *more]
        for mode in (None, 0o777):
            if mode is not None:
                running.agent.path.chmod(mode)
            said = subprocess.run(words, check=False, capture_output=True, timeout=SECONDS)
            assert (said.stdout.strip() not in (b"", b"0")) is may
        assert running.agent.counts["strangers"] == (0 if may else 1)
        running.stop()


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Warnings are not kept: with the error that one names, all would live that met it."""
    logger = logging.getLogger("tandem.kvtransfer.transports.agent.transport")
    logger.disabled = True
    yield
    logger.disabled = False


_ANSWER = st.one_of(
    st.builds(wire.Hello, st.sampled_from([2, 2, 1]), st.just(FRESH)),
    st.just(wire.Registered()),
    st.builds(wire.Rejected, st.text(max_size=9)),
    st.builds(wire.Copied, st.integers(0, 5) | NUMBER, st.binary(max_size=40), st.just(FRESH)),
    st.builds(wire.Refused, st.integers(0, 5) | NUMBER, st.sampled_from(wire.Fault)),
    st.just(wire.Counts({"x": 1})),
)


@fuzzing(75)
@given(
    answers=st.lists(
        st.tuples(
            _ANSWER, st.none() | st.sampled_from(Spoil), st.integers(0, 300), st.sampled_from(ODD)
        ),
        max_size=5,
    ),
    greets=st.booleans(),
)
@example(answers=[(wire.Copied(0, bytes(16), FRESH), None, 0, None)] * 2, greets=True)
@example(answers=[(wire.Copied(3, bytes(16), FRESH), None, 0, None)], greets=True)
def test_whatever_an_agent_without_the_key_says_reads_fail_and_write_nothing(
    answers: list[Any], greets: bool, quiet: None
) -> None:
    """One that has not the producer's key: the read fails, and no descriptor stays open."""
    before = descriptors()
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        folder = Path(name)
        taker = AgentWorker(folder, 5)
        taker.transport.receive(taker.slots, taker.blocks)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as odd:
            odd.bind(str(folder / wire.SOCKET_NAME))
            odd.listen(1)
            card = wire.AgentCard(wire.VERSION, place_of(folder), ME, SECRET)
            taker.transport.connect(ME, "", encode(card))  # type: ignore[arg-type]
            agent, _ = odd.accept()
        read = taker.transport.read(ME, [block(2, 1)])  # type: ignore[arg-type]
        with closing(agent), suppress(BrokenPipeError, ConnectionResetError):
            if greets:
                agent.send(encode(wire.Hello(wire.VERSION, FRESH)))
            for message, spoil, at, value in answers:
                agent.send(spoiled(message, spoil, at, value)[: wire.MAX_MESSAGE])
                taker.transport.advance()
        how = ended(taker.transport, read)
        taker.transport.stop()
        assert how is Progress.FAILED
        assert (taker.kv_cache == 5).all()
    del taker, agent, odd
    if descriptors() > before:  # a look at all objects takes long in a process that has many
        gc.collect()
    assert descriptors() <= before
