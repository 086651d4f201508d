"""The socket that gives descriptors, and who takes them: any bytes, in any pieces, with anything
beside them."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kvtransfer.fuzz.words import fuzzing
from tests.kvtransfer.mapped.test_mapped import block, ended
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES, Worker
from tests.waiting import wait_for

from tandem.kernels.memory.shared import SharedMemory
from tandem.kvtransfer.memory.blocks import TAG_BYTES
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.mapped.wire import (
    GREETING,
    MAGIC,
    SIZES,
    MappedCard,
    decode_card,
    encode_card,
)

SECONDS = 10.0
PIECES = st.lists(st.binary(min_size=1, max_size=50), max_size=4)


def descriptors() -> set[str]:
    """Open ones of this process, by number and by what each is: what closes beside the test, as a
    socket that is collected late, is no reason to wait, and what took its number is another."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own is closed again
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short name: that of a socket is bounded."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def giver(folder: Path) -> Iterator[Worker]:
    """Whose blocks are sevens, and who serves."""
    made = Worker(folder, 7)
    made.card = decode_card(made.transport.serve(made.slots, made.blocks))  # type: ignore[attr-defined]
    yield made
    made.transport.stop()


@pytest.fixture(scope="module")
def taker(folder: Path) -> Iterator[Worker]:
    """Whose blocks are zeros."""
    made = Worker(folder, 0)
    made.transport.receive(made.slots, made.blocks)
    yield made
    made.transport.stop()


def _called(giver: Worker, folder: Path, pieces: list[bytes], fds: int) -> tuple[bytes, list[int]]:
    """What a caller is given that says these pieces, descriptors with the first, and listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(SECONDS)
        caller.connect(str(folder / giver.card.name))  # type: ignore[attr-defined]
        with suppress(BrokenPipeError, ConnectionResetError):
            for number, piece in enumerate(pieces):
                if number == 0 and fds:
                    socket.send_fds(caller, [piece], [caller.fileno()] * fds)
                else:
                    caller.sendall(piece)
            caller.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            data, given_fds, _, _ = socket.recv_fds(caller, 200, 8)
            return data, list(given_fds)
        return b"", []


@fuzzing(150)
@given(pieces=PIECES, right=st.integers(0, 40), fds=st.integers(0, 3))
def test_who_greets_with_anything_else_is_given_nothing(
    giver: Worker, folder: Path, pieces: list[bytes], right: int, fds: int
) -> None:
    """Beginnings of the right greeting, other bytes, descriptors beside them: each caller that said
    something is counted once and closed, nothing stays open, and the next right one is served."""
    greeting = GREETING.pack(MAGIC, giver.incarnation, giver.card.secret)  # type: ignore[attr-defined]
    said = [greeting[:right], *pieces] if right else pieces
    if b"".join(said).startswith(greeting):  # what follows is not heard any more
        return
    before, counted = descriptors(), giver.garbage
    assert _called(giver, folder, said, fds) == (b"", [])
    if said:
        wait_for(lambda: giver.garbage == counted + 1)
    data, given_fds = _called(giver, folder, [greeting[:17], greeting[17:]], 0)
    for each in given_fds:
        os.close(each)
    assert len(given_fds) == 3
    assert SIZES.unpack(data)[0] == MAGIC
    wait_for(lambda: descriptors() <= before, seen=lambda: descriptors() - before)
    assert giver.garbage == counted + bool(said)
    assert (giver.slab == 7).all()


def _memory(size: int) -> int:
    made = SharedMemory.make(size)
    return made.descriptor


def _unsealed(size: int) -> int:
    made = os.memfd_create("odd", os.MFD_CLOEXEC)
    os.ftruncate(made, size)
    return made


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


KINDS: dict[str, Callable[[], int]] = {
    "slab": lambda: _memory(BLOCKS * BYTES),
    "less": lambda: _memory(BYTES // 2),
    "tags": lambda: _memory(BLOCKS * TAG_BYTES),
    "unsealed": lambda: _unsealed(BLOCKS * BYTES),
    "pipe": _pipe,
    "zero": lambda: os.open("/dev/zero", os.O_RDWR),
    "folder": lambda: os.open("/tmp", os.O_RDONLY),
    "written only": lambda: os.open("/dev/null", os.O_WRONLY),
}
_SIZE = st.sampled_from(
    [
        0,
        1,
        BYTES,
        BLOCKS * BYTES,
        BLOCKS * TAG_BYTES,
        1 << 40,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
    ]
)
_SIZES = st.builds(lambda a, b, c: SIZES.pack(MAGIC, a, b, c), _SIZE, _SIZE, _SIZE)


@fuzzing(150)
@given(
    answer=_SIZES | st.binary(max_size=60),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=5),
    cut=st.integers(0, 60),
)
@example(answer=SIZES.pack(MAGIC, BLOCKS * BYTES, BYTES, 64), kinds=["slab"] * 3, cut=0)
@example(answer=SIZES.pack(MAGIC, 1 << 63, BYTES, 64), kinds=["slab"] * 3, cut=0)
@example(answer=SIZES.pack(MAGIC, BYTES, BYTES, (1 << 64) - 1), kinds=["slab"] * 3, cut=0)
@example(answer=SIZES.pack(MAGIC, BYTES, BYTES, 64), kinds=["unsealed", "slab", "tags"], cut=0)
def test_whatever_is_given_is_refused_or_read_within_its_bounds(
    taker: Worker, folder: Path, answer: bytes, kinds: list[str], cut: int
) -> None:
    """Sizes that are none of theirs, other things than memory, too few and too many: the read ends,
    no descriptor stays open, and nothing but its own block is written."""
    before = descriptors()
    name = folder / "00.sock"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as odd:
        name.unlink(missing_ok=True)
        odd.bind(str(name))
        odd.listen(1)
        peer = taker.incarnation
        card = encode_card(MappedCard(name.name, b"s" * 16, b"i" * 16))
        taker.transport.connect(peer, "127.0.0.1", card)
        read = taker.transport.read(peer, [block(2, 1)])
        caller, _ = odd.accept()
        with caller:
            fds = [KINDS[kind]() for kind in kinds]
            first = answer[: cut or None]
            if first:
                socket.send_fds(caller, [first], fds)
                with suppress(BrokenPipeError):
                    caller.sendall(answer[len(first) :])
            for each in fds:
                os.close(each)
        how = ended(taker.transport, read)
        taker.transport.tags_of(read)
        taker.transport.close(peer)
    if how is Progress.DONE:
        assert first == answer
        assert len(kinds) >= 3
        assert "unsealed" not in kinds[:3]
    for place in range(BLOCKS):
        assert place == 2 or not taker.slab[place].any()
    taker.slab.zero_()
    assert descriptors() <= before
