"""Callers and agents that have not the producer's secret, and memory that is not what it is said to
be: what they are given, what they can do to the agent's memory, and what they leave behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.kvtransfer.agent.agents import SLOT, AgentWorker, Running
from tests.kvtransfer.agent.test_agent import linked, read
from tests.kvtransfer.fuzz.test_fuzz_agent import FRESH, ME, called, heard
from tests.kvtransfer.fuzz.test_fuzz_descriptors import descriptors
from tests.kvtransfer.mapped.test_mapped import block, ended
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES
from tests.waiting import wait_for

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import TAG_BYTES, TURN_BYTES
from tandem.kvtransfer.transports.agent import line as agent_line
from tandem.kvtransfer.transports.agent import wire
from tandem.kvtransfer.transports.agent.line import Line, agent_folder
from tandem.kvtransfer.transports.agent.wire import VERSION, Copied, Copy, encode
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.mapped.wire import COPYING, key_for, place_of
from tandem.memory import shared
from tandem.memory.shared import SharedMemory

SEAL, SHRINK, GROW, WRITE, FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10
ADD_SEALS, GET_SEALS = 1033, 1034
TAGS = BLOCKS * (TAG_BYTES + TURN_BYTES)
GIVE = wire.Give(VERSION, ME, b"k" * 32, (BLOCKS * BYTES, BYTES, TAGS), BYTES, "host")
TAKE = wire.Take(VERSION, ME, SLOT, 1, BYTES, "host", FRESH)


def memory(size: int, *, share: bool = True, touch: bool = True) -> int:
    """A descriptor of memory, sealed as what is given to be read unless it is not shared."""
    made = SharedMemory.make(size)
    if touch:
        made.map()[:] = bytes([1]) * size
    with closing(made):
        return made.share(writable=not share)


def plain(size: int, seals: int = SHRINK | GROW | FUTURE_WRITE | SEAL) -> int:
    made = os.memfd_create("odd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    with mmap.mmap(made, size) as view:
        view[:] = bytes([1]) * size
    fcntl.fcntl(made, ADD_SEALS, seals)
    return made


def file(size: int) -> int:
    made = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.write(made, bytes(size))
    return made


def asked(folder: Path, message: Any, files: list[int]) -> Any:
    """The agent's answer to a registration, whose connection ends then."""
    sock, _ = called(folder)
    with closing(sock):
        socket.send_fds(sock, [encode(message)], files)
        for each in files:
            os.close(each)
        return heard(sock)


def whole() -> list[int]:
    return [memory(size) for size in GIVE.sizes]


SLABS: dict[str, Callable[[], int]] = {
    "a page less": lambda: memory((BLOCKS - 1) * BYTES),
    "a page more": lambda: memory((BLOCKS + 1) * BYTES),
    "its bytes unsealed": lambda: memory(BLOCKS * BYTES, share=False),
    "its growth unsealed": lambda: plain(BLOCKS * BYTES, SHRINK | FUTURE_WRITE | SEAL),
    "its length unsealed": lambda: plain(BLOCKS * BYTES, GROW | FUTURE_WRITE | SEAL),
    "its seals unsealed": lambda: plain(BLOCKS * BYTES, SHRINK | GROW | FUTURE_WRITE),
    "a file": lambda: file(BLOCKS * BYTES),
    "a device": lambda: os.open("/dev/zero", os.O_RDWR),
    "a socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "a folder": lambda: os.open("/tmp", os.O_RDONLY),
}


@pytest.mark.parametrize("at", range(3), ids=["kv_cache", "slots", "tags"])
@pytest.mark.parametrize("kind", SLABS)
def test_a_producer_gives_sealed_memory_of_the_said_sizes(
    running: Running, folder: Path, kind: str, at: int
) -> None:
    """Anything else is rejected with what is wrong, whichever range it is, and none is kept."""
    before = descriptors()
    files = whole()
    os.close(files[at])
    files[at] = SLABS[kind]()
    answer = asked(folder, GIVE, files)
    assert isinstance(answer, wire.Rejected)
    wait_for(lambda: descriptors() <= before, seen=lambda: descriptors() - before)
    assert isinstance(asked(folder, GIVE, whole()), wire.Registered)


def test_tags_that_were_not_touched_are_rejected(running: Running, folder: Path) -> None:
    """The agent maps tags: reading a page that is not there makes it, as the agent's memory."""
    files = [*whole()[:2], memory(1 << 20, touch=False)]
    said = msgspec.structs.replace(GIVE, sizes=(*GIVE.sizes[:2], 1 << 20))
    answer = asked(folder, said, files)
    assert isinstance(answer, wire.Rejected)
    assert "not touched" in answer.reason


@pytest.mark.parametrize("count", [0, 1, 2, 4, 40])
def test_a_registration_has_just_its_descriptors(
    running: Running, folder: Path, count: int
) -> None:
    """Fewer or more end the connection, and none is kept."""
    before = descriptors()
    sizes = (GIVE.sizes * 20)[:count]
    assert asked(folder, GIVE, [memory(each) for each in sizes]) is None
    if count != 1:
        assert asked(folder, TAKE, [memory(SLOT, share=False) for _ in sizes]) is None
    wait_for(lambda: descriptors() <= before, seen=lambda: descriptors() - before)
    assert running.agent.counts["garbage"] > 0


RINGS: dict[str, Callable[[], int]] = {
    "a page less": lambda: memory(SLOT - 4096, share=False),
    "a page more": lambda: memory(SLOT + 4096, share=False),
    "untouched": lambda: memory(SLOT, share=False, touch=False),
    "shared to be read": lambda: memory(SLOT),
    "sealed but not against holes": lambda: plain(SLOT, SHRINK | GROW | SEAL),
    "sealed but not its size": lambda: plain(SLOT, SEAL),
    "a file": lambda: file(SLOT),
    "a device": lambda: os.open("/dev/zero", os.O_RDWR),
}


@pytest.mark.parametrize("kind", RINGS)
def test_a_ring_is_touched_memory_that_can_be_sealed(
    running: Running, folder: Path, kind: str
) -> None:
    """Anything else is rejected, and not kept."""
    before = descriptors()
    assert isinstance(asked(folder, TAKE, [RINGS[kind]()]), wire.Rejected)
    wait_for(lambda: descriptors() <= before, seen=lambda: descriptors() - before)
    assert isinstance(asked(folder, TAKE, [memory(SLOT, share=False)]), wire.Registered)


def _punched(descriptor: int, view: mmap.mmap) -> list[int]:
    """How each way to take pages out of memory fails: by its descriptor, by a mapping, by its
    size. 0 where it does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = []
    for mode in (0x03, 0x10 | 0x01):  # PUNCH_HOLE and ZERO_RANGE, which keep the size
        status = libc.fallocate(descriptor, mode, ctypes.c_long(0), ctypes.c_long(SLOT))
        found.append(ctypes.get_errno() if status else 0)
    for change in (
        lambda: view.madvise(9),  # MADV_REMOVE
        lambda: os.ftruncate(descriptor, 0),
        lambda: os.ftruncate(descriptor, 2 * SLOT),
        lambda: os.write(descriptor, b"x"),
        lambda: fcntl.fcntl(descriptor, ADD_SEALS, WRITE),
    ):
        try:
            change()
            found.append(0)
        except OSError as error:
            found.append(error.errno or -1)
    return found


def test_a_ring_cannot_be_punched_once_it_is_registered(
    running: Running, folder: Path, producer: AgentWorker
) -> None:
    """By no holder and in no way: the agent's copies make no page of the agent's own. Its owner's
    mapping from before stays, and shows what has landed."""
    card = wire.decode_card(producer.serve())
    ring = memory(SLOT, share=False)
    with mmap.mmap(ring, SLOT) as view:
        sock, challenge = called(folder)
        with closing(sock):
            socket.send_fds(sock, [encode(TAKE)], [ring])
            assert isinstance(heard(sock), wire.Registered)
            blocks = os.fstat(ring).st_blocks
            assert all(
                error in (errno.EPERM, errno.EBUSY, errno.EOPNOTSUPP)
                for error in _punched(ring, view)
            )
            assert os.fstat(ring).st_blocks == blocks
            assert fcntl.fcntl(ring, GET_SEALS) & FUTURE_WRITE
            connection = wire.Connection(challenge, FRESH)
            key = key_for(card.secret, COPYING)
            names = card.incarnation, ME
            proof = wire.consumers_proof(key, connection, *names)
            request = Copy(0, names[0], proof, ME, wire.Ground.BLOCKS, (0, BYTES), BYTES, 0)
            sock.send(encode(request))
            assert isinstance(heard(sock), Copied)
            assert view[:] == b"\x07" * SLOT
            assert os.fstat(ring).st_blocks == blocks
    os.close(ring)


def test_memory_that_was_given_to_be_read_cannot_be_punched() -> None:
    """Nor by its owner: what maps it would get pages of its own."""
    given = memory(SLOT)
    made = shared.shared_tensor(SLOT).fill_(1)
    own, _ = shared.descriptor_of(made)
    libc = ctypes.CDLL(None, use_errno=True)
    for each in (given, own):
        assert libc.fallocate(each, 0x03, ctypes.c_long(0), ctypes.c_long(4096)) == -1
        assert ctypes.get_errno() == errno.EPERM
        os.close(each)
    address = ctypes.c_void_p(made.data_ptr())
    assert libc.madvise(address, ctypes.c_size_t(4096), 9) == -1
    assert made.all()


class Overheard:
    """All that workers send to an agent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[bytes] = []
        say = Line.send_message

        def keep(line: Line, message: Any, *args: Any) -> bool:
            self.messages.append(encode(message))
            return say(line, message, *args)

        monkeypatch.setattr(Line, "send_message", keep)


def test_no_secret_is_sent_to_the_agent(
    running: Running,
    folder: Path,
    consumer: AgentWorker,
    producer: AgentWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A producer sends a key that is for the agent alone, a consumer a proof for its connection."""
    overheard = Overheard(monkeypatch)
    peer = linked(consumer, producer)
    assert read(consumer, peer, block(0, 0)) is Progress.DONE
    secret = consumer.transport._secrets[peer]
    assert len(overheard.messages) >= 3
    assert not any(secret in each for each in overheard.messages)
    key = key_for(secret, COPYING)
    assert sum(key in each for each in overheard.messages) == 1, "the producer's registration"


def test_a_proof_of_another_connection_is_denied(
    running: Running, folder: Path, producer: AgentWorker
) -> None:
    """What was heard of one consumer serves no other, nor itself on its next connection."""
    card = wire.decode_card(producer.serve())
    key, names = key_for(card.secret, COPYING), (card.incarnation, ME)
    kept = b""
    for turn in range(2):
        ring = memory(SLOT, share=False)
        sock, challenge = called(folder)
        with closing(sock):
            socket.send_fds(sock, [encode(TAKE)], [ring])
            os.close(ring)
            assert isinstance(heard(sock), wire.Registered)
            right = wire.consumers_proof(key, wire.Connection(challenge, FRESH), *names)
            proof = kept = kept or right
            sock.send(encode(Copy(0, names[0], proof, ME, wire.Ground.BLOCKS, (0,), BYTES, 0)))
            answer = heard(sock)
        if turn == 0:
            assert isinstance(answer, Copied)
            assert answer.proof != proof, "no proof of one end is one of the other"
        else:
            assert answer == wire.Refused(0, wire.Fault.DENIED)


@pytest.mark.parametrize("proof", ["none", "the consumer's", "right"])
def test_an_agent_that_has_not_the_producers_key_brings_nothing(
    folder: Path, consumer: AgentWorker, proof: str
) -> None:
    """A process of this user in the agent's place answers as an agent does: the read fails, the
    agent is left, and no block is written."""
    secret = b"s" * 32
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as odd:
        odd.bind(str(folder / wire.SOCKET_NAME))
        odd.listen(1)
        odd.settimeout(10.0)
        card = wire.AgentCard(VERSION, place_of(folder), ME, secret)
        consumer.transport.connect(ME, "", encode(card))  # type: ignore[arg-type]
        agent, _ = odd.accept()
        with agent:
            agent.settimeout(10.0)
            agent.send(encode(wire.Hello(VERSION, FRESH)))
            ticket = consumer.transport.read(ME, [block(2, 1)])  # type: ignore[arg-type]
            consumer.transport.advance()
            take = wire.to_agent.decode(agent.recv(wire.MAX_MESSAGE))
            assert isinstance(take, wire.Take)
            agent.send(encode(wire.Registered()))
            consumer.transport.advance()
            request = wire.to_agent.decode(agent.recv(wire.MAX_MESSAGE))
            assert isinstance(request, Copy)
            connection, key = wire.Connection(FRESH, take.challenge), key_for(secret, COPYING)
            tags = bytes(16)
            said = {
                "none": bytes(32),
                "the consumer's": request.proof,
                "right": wire.agents_proof(key, connection, request, tags),
            }[proof]
            agent.send(encode(Copied(request.number, tags, said)))
            how = ended(consumer.transport, ticket)
    assert how is (Progress.DONE if proof == "right" else Progress.FAILED)
    assert consumer.transport._asker.connected is (proof == "right")


def test_an_agent_of_another_release_is_named(folder: Path, consumer: AgentWorker) -> None:

    class Before(msgspec.Struct, array_like=True, tag="hello"):
        version: int

    for hello, version in ((Before(1), 1), (wire.Hello(3, FRESH), 3)):
        message = wire.to_worker.decode(encode(hello))
        with pytest.raises(TransportError, match=f"version {version}, allowed is 2"):
            agent_line.check_hello(message)
    assert msgspec.msgpack.decode(encode(wire.Hello(VERSION, FRESH)), type=Before).version == 2
    old = msgspec.msgpack.encode((place_of(folder), ME, b"s" * 16))
    with pytest.raises(TransportError, match="version 1 of the agent's protocol, allowed: 2"):
        consumer.transport.connect(ME, "", old)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda at: at.symlink_to("/dev/log"), Path.touch, Path.mkdir])
def test_only_a_socket_is_called_as_the_agent(folder: Path, make: Any) -> None:
    make(folder / wire.SOCKET_NAME)
    with pytest.raises(TransportError, match="is not a socket"):
        Line(folder)


def test_the_agents_folder_is_beside_only_where_root_put_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod. Elsewhere another user could make such a folder, and would be trusted there."""
    own = folder / "node"
    own.mkdir()
    folder.chmod(0o755)
    assert agent_folder(own) == own
    (folder / "node-agent").symlink_to(folder)
    assert agent_folder(own) == own
    (folder / "node-agent").unlink()
    (folder / "node-agent").mkdir()
    roots = os.getuid() == 0
    assert agent_folder(own) == (folder / "node-agent" if roots else own)
    for mode in (0o1777, 0o775):
        folder.chmod(mode)
        assert agent_folder(own) == own
