"""The socket that gives descriptors, and who takes them: any bytes, in any pieces, with anything
beside them."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kvtransfer.fuzz.words import fuzzing
from tests.kvtransfer.mapped import hand
from tests.kvtransfer.mapped.test_mapped import block, ended
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES, Worker
from tests.waiting import wait_for

from tandem.kvtransfer.memory.blocks import TAG_BYTES, TURN_BYTES
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.mapped.wire import ANSWER, MAGIC, SIZES, decode_card
from tandem.memory.shared import SharedMemory

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
    made = Worker(folder, 0)
    made.transport.receive(made.slots, made.blocks)
    yield made
    made.transport.stop()


class Said(NamedTuple):
    """Some bytes of the right answer, other bytes after them, and descriptors with the first."""

    right: int
    pieces: list[bytes]
    files: int

    def __call__(self, answer: bytes) -> list[bytes]:
        return [answer[: self.right], *self.pieces] if self.right else self.pieces


def _called(giver: Worker, folder: Path, said: Said) -> tuple[bytes, list[int]]:
    """What a caller is given that says this, and listens."""
    card = giver.card  # type: ignore[attr-defined]
    caller, challenge = hand.called(str(folder / card.name))
    mine, theirs = socket.socketpair()
    with caller, mine:
        with theirs, suppress(BrokenPipeError, ConnectionResetError):
            right = hand.answer(card, challenge, theirs)
            for number, piece in enumerate(said(right)):
                files = [theirs.fileno()] * (said.files if number == 0 else 0)
                if files:
                    socket.send_fds(caller, [piece], files)
                else:
                    caller.sendall(piece)
            caller.shutdown(socket.SHUT_WR)
        return hand.taken(mine)


@fuzzing(75)
@given(
    said=st.builds(
        Said, st.integers(0, ANSWER.size) | st.just(ANSWER.size), PIECES, st.integers(0, 3)
    )
)
@example(said=Said(ANSWER.size, [], 0))
@example(said=Said(ANSWER.size, [], 2))
@example(said=Said(ANSWER.size, [], 3))
@example(said=Said(ANSWER.size - 1, [], 1))
def test_who_greets_with_anything_else_is_given_nothing(
    giver: Worker, folder: Path, said: Said
) -> None:
    """Beginnings of the right answer, other bytes, descriptors beside them: each caller that said
    something is counted once and closed, nothing stays open, and the next right one is served."""
    if said.right == ANSWER.size and said.files == 1:  # what follows is not heard any more
        return
    before, counted = descriptors(), giver.garbage
    assert _called(giver, folder, said) == (b"", [])
    if said.right or said.pieces:
        wait_for(lambda: giver.garbage == counted + 1)
    card = giver.card  # type: ignore[attr-defined]
    data, given_fds = hand.asked(str(folder / card.name), card)
    for each in given_fds:
        os.close(each)
    assert len(given_fds) == 3
    assert SIZES.unpack(data)[0] == MAGIC
    wait_for(lambda: descriptors() <= before, seen=lambda: descriptors() - before)
    assert giver.garbage == counted + bool(said.right or said.pieces)
    assert (giver.kv_cache == 7).all()


def _memory(size: int) -> int:
    made = SharedMemory.make(size)
    made.map()[:] = bytes(size)
    with closing(made):
        return made.share()


def _writable(size: int) -> int:
    return SharedMemory.make(size).descriptor


def _unsealed(size: int) -> int:
    made = os.memfd_create("odd", os.MFD_CLOEXEC)
    os.ftruncate(made, size)
    return made


def _pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


KINDS: dict[str, Callable[[], int]] = {
    "kv_cache": lambda: _memory(BLOCKS * BYTES),
    "less": lambda: _memory(BYTES // 2),
    "tags": lambda: _memory(BLOCKS * (TAG_BYTES + TURN_BYTES)),
    "writable": lambda: _writable(BLOCKS * BYTES),
    "ring": lambda: _writable(2 * BYTES * 4),
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
        BLOCKS * (TAG_BYTES + TURN_BYTES),
        1 << 40,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
    ]
)
_RIGHT = (BLOCKS * BYTES, BLOCKS * BYTES, BLOCKS * (TAG_BYTES + TURN_BYTES))
_SIZES = st.builds(lambda a, b, c: SIZES.pack(MAGIC, a, b, c), _SIZE, _SIZE, _SIZE)


@fuzzing(75)
@given(
    answer=_SIZES | st.binary(max_size=60),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=5),
    cut=st.integers(0, 60),
)
@example(answer=SIZES.pack(MAGIC, BLOCKS * BYTES, BYTES, 64), kinds=["kv_cache"] * 3, cut=0)
@example(answer=SIZES.pack(MAGIC, *_RIGHT), kinds=["kv_cache", "kv_cache", "tags"], cut=0)
@example(answer=SIZES.pack(MAGIC, *_RIGHT), kinds=["kv_cache", "writable", "tags"], cut=0)
@example(answer=SIZES.pack(MAGIC, 1 << 63, BYTES, 64), kinds=["kv_cache"] * 3, cut=0)
@example(answer=SIZES.pack(MAGIC, BYTES, BYTES, (1 << 64) - 1), kinds=["kv_cache"] * 3, cut=0)
@example(answer=SIZES.pack(MAGIC, BYTES, BYTES, 64), kinds=["unsealed", "kv_cache", "tags"], cut=0)
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
        taker.transport.connect(peer, "127.0.0.1", hand.encoded(name.name))
        read = taker.transport.read(peer, [block(2, 1)])
        caller, _ = odd.accept()
        with caller:
            fds = [KINDS[kind]() for kind in kinds]
            first = answer[: cut or None]
            hand.challenge_to(caller)
            taker.transport.advance()
            hand.give(caller, hand.card_of(name.name), taker.incarnation, first, fds)
            for each in fds:
                os.close(each)
        how = ended(taker.transport, read)
        taker.transport.tags_of(read)
        taker.transport.close(peer)
    if how is Progress.DONE:
        assert first == answer
        assert len(kinds) == 3
        assert not {"unsealed", "writable", "ring"} & set(kinds)
    for place in range(BLOCKS):
        assert place == 2 or not taker.kv_cache[place].any()
    taker.kv_cache.zero_()
    assert descriptors() <= before
