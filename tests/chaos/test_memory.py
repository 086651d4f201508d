"""Flipped bits and clocks that are elsewhere: they are what they are said to be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from tests.chaos.clocks import set_clock
from tests.chaos.memory import Flipper

from tandem.kvtransfer.memory.blocks import SharedTags
from tandem.kvtransfer.memory.header import (
    HEADER_BYTES,
    Header,
    header_bytes,
    key_digest,
    read_header,
)
from tandem.kvtransfer.memory.slots import SharedSlots, SlotMemory
from tandem.protocol.ids import Incarnation, RequestKey

BLOCKS, BLOCK_BYTES, SLOT_BYTES = 300, 1024, 1 << 20
DAY = 86_400.0


@pytest.fixture
def memory() -> Iterator[int]:
    """This process's own, as it is found from outside."""
    descriptor = os.open("/proc/self/mem", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def packed(slots: SlotMemory, slot: int, part: int = 0) -> Header:
    """A part of three blocks in a slot."""
    slab = torch.full((4, BLOCK_BYTES), slot, dtype=torch.uint8)
    header = Header(
        key=b"k" * 16,
        fingerprint=b"f" * 16,
        producer=Incarnation(b"p" * 16),
        part=part,
        group=0,
        start=0,
        stop=48,
        nbytes=HEADER_BYTES + 3 * BLOCK_BYTES,
        digest=0,
    )
    slots.pack(slab, [0, 1, 2], slot, header)
    return read_header(slots.read(slot, HEADER_BYTES))


def test_a_bit_of_each_written_slot_is_flipped_once(memory: int):
    """Until it is written again; a slot without a header is let be, as one is that is packed."""
    slots = SharedSlots(3, SLOT_BYTES)  # in a mapping of its own, whatever this process did before
    flipper = Flipper(os.getpid(), BLOCKS, seed=1)
    headers = [packed(slots, slot) for slot in (0, 1)]
    before = [slots.read(slot, SLOT_BYTES) for slot in range(3)]
    flipper.find(memory)
    mine = [slots.address + slot * SLOT_BYTES for slot in (0, 1)]
    assert set(mine) <= set(flipper.slots)
    flipper.slots = mine
    flipper.flip(memory)
    flipper.flip(memory)
    assert flipper.flipped == 2
    for slot, header in enumerate(headers):
        now = slots.read(slot, SLOT_BYTES)
        changed = [at for at in range(SLOT_BYTES) if now[at] != before[slot][at]]
        assert len(changed) == 1
        assert changed[0] < header.nbytes
    assert slots.read(2, SLOT_BYTES) == before[2]
    slots.write(0, bytes(HEADER_BYTES))
    flipper.flip(memory)
    assert flipper.flipped == 2
    packed(slots, 0, part=1)
    flipper.flip(memory)
    assert flipper.flipped == 3


def test_tags_that_are_set_are_flipped(memory: int):
    """One bit in one tag at a time; cleared ones stay cleared."""
    tags = SharedTags(BLOCKS)
    flipper = Flipper(os.getpid(), BLOCKS, seed=2)
    tags.set(RequestKey(b"r" * 16, "request", 1), 7, b"t" * 16)
    flipper.find(memory)
    flipper.slots = []
    for _ in range(100_000):
        flipper.flip(memory)
        if flipper.flipped:
            break
    assert flipper.flipped == 1
    assert tags.read(7) != b"t" * 16
    assert not any(any(tags.read(block)) for block in range(BLOCKS) if block != 7)


def test_a_part_of_a_pull_is_found_by_its_key(memory: int):
    """The one that was packed for it, and no other; where none was, no bit is another."""
    slots = SharedSlots(3, SLOT_BYTES)
    key = RequestKey(b"r" * 16, "pulled", 1)
    other = packed(slots, 0)
    header = packed(slots, 1)._replace(key=key_digest(key), part=2)
    slots.write(1, header_bytes(header))
    before = [slots.read(slot, SLOT_BYTES) for slot in range(3)]
    flipper = Flipper(os.getpid(), BLOCKS, seed=4)
    assert not flipper.flip_part(key, 3)
    assert flipper.flip_part(key, 2)
    assert flipper.flipped == 1
    now = slots.read(1, SLOT_BYTES)
    changed = [at for at in range(SLOT_BYTES) if now[at] != before[1][at]]
    assert len(changed) == 1
    assert changed[0] < other.nbytes
    assert [slots.read(slot, SLOT_BYTES) for slot in (0, 2)] == [before[0], before[2]]


def test_a_tag_of_a_block_is_flipped_if_it_has_one():
    """What is cleared is nobody's."""
    tags = SharedTags(BLOCKS)
    tags.set(RequestKey(b"r" * 16, "request", 1), 7, b"t" * 16)
    flipper = Flipper(os.getpid(), BLOCKS, seed=5)
    assert not flipper.flip_tag(8)
    assert flipper.flip_tag(7)
    assert tags.read(7) != b"t" * 16
    assert flipper.flipped == 1


def test_a_process_that_is_gone_ends_it():
    """Its memory is no longer there."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(30)
    flipper = Flipper(child.pid, BLOCKS, seed=3)
    assert not flipper.flip_part(RequestKey(b"r" * 16, "request", 1), 0)
    assert not flipper.flip_tag(1)
    thread = flipper.flip_for(600.0)
    thread.join(60)
    assert not thread.is_alive()
    assert flipper.flipped == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="clocks of their own want root")
def test_a_clock_is_days_ahead_and_the_next_one_is_not():
    """Of processes that are started, not of this one."""
    words = [sys.executable, "-c", "import time; print(time.monotonic())"]

    def clock() -> float:
        return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    set_clock(5 * DAY)
    try:
        assert abs(clock() - time.monotonic() - 5 * DAY) < 60.0
    finally:
        set_clock(0.0)
    assert abs(clock() - time.monotonic()) < 60.0
