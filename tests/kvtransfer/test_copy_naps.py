"""When D looks after copies, and how tags of hundreds of blocks are compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.kvtransfer.builders import make_key

from tandem.kvtransfer.handoff.actions import Read, Unpack
from tandem.kvtransfer.memory.blocks import CLEARED, tag_of, tags_from
from tandem.kvtransfer.mover import reads
from tandem.kvtransfer.mover.identity import fault_of_copy
from tandem.kvtransfer.mover.reads import Reads
from tandem.kvtransfer.transports.base import Progress
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation

PEER = Incarnation(b"p" * 16)
BLOCK = 4 << 20
HASHES = tuple(BlockHash(bytes([number]) * 16) for number in range(5))


class Line:
    """A transport whose copies end when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def read(self, peer: Incarnation, extents: Any) -> int:
        """A ticket."""
        return 1

    def poll(self, ticket: int) -> Progress:
        """As was said."""
        return Progress.DONE if self.done else Progress.PENDING

    def advance(self) -> None:
        """Nothing."""

    def tags_of(self, ticket: int) -> list[bytes]:
        """None."""
        return []


class Clock:
    """Of both kinds of time."""

    now = 100.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    perf_counter = monotonic


def test_the_next_look_is_when_a_copy_can_be_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy is asked after by its age; the next one sleeps to its end at that rate, and
    is then asked after by how late it is."""
    clock, line = Clock(), Line()
    monkeypatch.setattr(reads, "time", clock)
    table = Reads({"line": line}, BLOCK)  # type: ignore[dict-item]
    welcome: Any = SimpleNamespace(connector="line", slot_bytes=0)
    blocks = tuple(range(8))
    copy = Read(make_key("a"), PEER, 0, None, None, 8 * BLOCK, blocks, blocks)
    table.start(copy, welcome, 0)
    clock.now += 0.0032
    assert table.nap(lambda: 9.0) == pytest.approx(0.0001)
    line.done = True
    assert [each.progress for each in table.ended()] == [Progress.DONE]
    line.done = False
    table.start(copy, welcome, 0)
    assert table.nap(lambda: 9.0) == pytest.approx(0.0032)
    clock.now += 0.0032
    assert table.nap(lambda: 9.0) == reads.LEAST_NAP_SECONDS
    clock.now += 0.0064
    assert table.nap(lambda: 9.0) == pytest.approx(0.0002)
    clock.now += 1.0
    assert table.nap(lambda: 9.0) == 9.0, "such a copy is none between GPUs"


def test_tags_of_many_blocks_are_those_of_each() -> None:
    """Hashes as far as they go, then the key's own; of another group they are named."""
    key = make_key("a")
    for group in (0, 1):
        wanted = [tag_of(key, group, index, HASHES) for index in range(2, 8)]
        assert tags_from(key, group, 2, 6, HASHES) == wanted


@pytest.mark.parametrize(
    ("at", "tag", "cause"),
    [(2, None, None), (2, CLEARED, FailCause.GONE), (1, b"x" * 16, FailCause.IDENTITY)],
)
def test_one_wrong_tag_among_right_ones_is_found(
    at: int, tag: bytes | None, cause: FailCause | None
) -> None:
    """Whichever block has it, and what it says decides who is to blame."""
    key = make_key("a")
    seen = tags_from(key, 0, 1, 4, HASHES)
    if tag is not None:
        seen[at] = tag
    item = Unpack(
        key=key,
        peer=PEER,
        index=0,
        slot=None,
        start=16,
        stop=80,
        nbytes=4 * BLOCK,
        block_ids=(1, 2, 3, 4),
    )
    fault = fault_of_copy(item, seen, HASHES, 16)
    assert (None if fault is None else fault[0]) is cause
    if fault is not None:
        assert f"block {at + 1} " in fault[1]
