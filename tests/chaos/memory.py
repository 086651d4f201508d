"""Bits that flip in a prefill worker's memory: in slots that wait to be read, and in the tags of
blocks that a decode worker maps.

The memory is found from outside, through /proc/PID: slots by their headers, which say their check
sum themselves, at the start of a page; tags as the smallest memory that is shared under their name.
Linux alone, as root or as the one who started the process.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from tandem.kvtransfer.memory.blocks import TAG_BYTES, TURN_BYTES
from tandem.kvtransfer.memory.packing import HEADER_BYTES, key_digest, read_header
from tandem.protocol.errors import WireError
from tandem.protocol.ids import RequestKey

MAGIC = b"TDMSLOT1"
PAGE = 4096
EVERY_SECONDS = 0.002
"""A part lies in its slot for a few of these."""
FIND_SECONDS = 0.5
"""Between searches: slots are not where they will be until they are written."""
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw\S+ \S+ \S+ \d+ *(.*)")
_SHARED = "/memfd:tandem-kv"
_OWN = ("/memfd:", "/dev/shm/", "/SYSV")
"""Names of memory that is shared; others that begin so are those of files."""
PATIENCE_SECONDS = 60.0
"""For so long more a flipper waits for its first bit, where nothing was written in its time."""
MOST_BYTES = 1 << 30
"""Larger mappings hold no slots of this line."""


class Flipper:
    """Flips bits of one process; the process may end at any time."""

    def __init__(self, pid: int, num_blocks: int, seed: int) -> None:
        self.flipped = 0
        self._pid = pid
        self._tags_bytes = num_blocks * (TAG_BYTES + TURN_BYTES)
        self._num_blocks = num_blocks
        self._draw = random.Random(seed)
        self.slots: list[int] = []
        """Addresses, as they were found last, and those between and behind them that are not
        written yet; those in the heap are not looked for."""
        self._knows_all = False
        """Whether a ring was found: a look at all memory takes seconds on a busy machine."""
        self._tags: int | None = None
        self._done: dict[int, bytes] = {}
        """What stood in the header of a slot of which a bit was flipped, by address."""

    def flip_for(self, seconds: float) -> threading.Thread:
        """In a thread of its own, which ends by itself; later, if there was no bit to flip."""
        thread = threading.Thread(target=self._run, args=(seconds,), daemon=True)
        thread.start()
        return thread

    def _run(self, seconds: float) -> None:
        end, found = time.monotonic() + seconds, 0.0
        with suppress(OSError), open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            while (now := time.monotonic()) < end + (0 if self.flipped else PATIENCE_SECONDS):
                if now >= found and not self._knows_all:
                    self.find(memory.fileno())
                    found = time.monotonic() + FIND_SECONDS
                self.flip(memory.fileno())
                time.sleep(EVERY_SECONDS)

    def find(self, memory: int) -> None:
        self.slots = []
        self._find_tags()
        for start, stop, name in self._mappings():
            size = stop - start
            if start != self._tags and size <= MOST_BYTES and _holds_slots(name):
                with suppress(OSError):
                    found = _slots_in(os.pread(memory, size, start), start)
                    self.slots += _ring_of(found, start, stop)
                    self._knows_all |= len(found) > 1

    def _find_tags(self) -> None:
        """Alone: that takes no look at memory."""
        sizes = range(self._tags_bytes, self._tags_bytes + PAGE)
        found = (
            start
            for start, stop, name in self._mappings()
            if name.startswith(_SHARED) and stop - start in sizes
        )
        self._tags = next(found, None)

    def flip_part(self, key: RequestKey, part: int) -> bool:
        """One bit of the slot that holds a part; False if no slot does."""
        wanted = key_digest(key), part
        with suppress(OSError), open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            for look in (lambda memory: None, self.find):  # where they were the last time, first
                look(memory.fileno())
                for at in self.slots:
                    with suppress(WireError):
                        header = read_header(os.pread(memory.fileno(), HEADER_BYTES, at))
                        if (header.key, header.part) == wanted:
                            self._flip_at(memory.fileno(), at + self._draw.randrange(header.nbytes))
                            return True
        return False

    def flip_tag(self, block: int) -> bool:
        """One bit of the tag of a block that peers map; False if there is none."""
        with suppress(OSError), open(f"/proc/{self._pid}/mem", "r+b", buffering=0) as memory:
            self._find_tags()
            at = None if self._tags is None else self._tags + block * TAG_BYTES
            if at is not None and any(os.pread(memory.fileno(), TAG_BYTES, at)):
                self._flip_at(memory.fileno(), at + self._draw.randrange(TAG_BYTES))
                return True
        return False

    def flip(self, memory: int) -> None:
        """One bit in each slot that was written since, and in the tag of one block."""
        for at in self.slots:
            head = os.pread(memory, HEADER_BYTES, at)
            if self._done.get(at) == head or not head.startswith(MAGIC):
                continue
            try:
                size = read_header(head).nbytes
            except WireError:
                continue
            self._flip_at(memory, at + self._draw.randrange(size))
            self._done[at] = os.pread(memory, HEADER_BYTES, at)
        if self._tags is not None and self._draw.random() < EVERY_SECONDS * 20:
            block, byte = self._draw.randrange(self._num_blocks), self._draw.randrange(TAG_BYTES)
            tag = os.pread(memory, TAG_BYTES, self._tags + block * TAG_BYTES)
            if any(tag):  # what is cleared is nobody's
                self._flip_at(memory, self._tags + block * TAG_BYTES + byte)

    def _flip_at(self, memory: int, at: int) -> None:
        bit = 1 << self._draw.randrange(8)
        os.pwrite(memory, bytes([os.pread(memory, 1, at)[0] ^ bit]), at)
        self.flipped += 1

    def _mappings(self) -> list[tuple[int, int, str]]:
        found = []
        for line in Path(f"/proc/{self._pid}/maps").read_text().splitlines():
            if match := _LINE.fullmatch(line):
                start, stop, name = match.groups()
                found.append((int(start, 16), int(stop, 16), name))
        return found


def _holds_slots(name: str) -> bool:
    """Whether slots may lie in a mapping: neither the heap or a stack, nor a file's."""
    return not name.startswith("[") and (not name.startswith("/") or name.startswith(_OWN))


def _slots_in(data: bytes, start: int) -> list[int]:
    """Addresses of slots in the memory from ``start`` on."""
    found, at = [], data.find(MAGIC)
    while at >= 0:
        if (start + at) % PAGE == 0:
            with suppress(WireError):
                read_header(data[at : at + HEADER_BYTES])
                found.append(start + at)
        at = data.find(MAGIC, at + 1)
    return found


def _ring_of(found: list[int], start: int, stop: int) -> list[int]:
    """All slots of a mapping, of which some were found: they are equally long, and each is written
    for the first time when those before it are taken."""
    gaps = [after - before for before, after in pairwise(found)]
    if not gaps:
        return found
    gap = min(gaps)
    return [*range(start + (found[0] - start) % gap, stop - HEADER_BYTES, gap)]
