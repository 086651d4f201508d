"""Host memory of offloaded blocks, and the copies to and from a rank's KV cache, in the order of
steps.

On a GPU copies run next to the steps, stores on one stream, loads on another. A step waits only for
stores of blocks that it writes; no step reads a block before the host has seen its load end. Other
writers wait for a step's fence. On a CPU everything is done at once.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from collections.abc import (
    Set as AbstractSet,
)
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.engine.step import (
    BlockLoad,
    BlockTransfers,
    SchedulerOutput,
    TransferReport,
)
from tandem.engine.worker.device_events import WAIT_SECONDS, DeviceEvent, OnStream, moment
from tandem.engine.worker.input_batch import InputBatch
from tandem.memory.page_locked import HostMemory, registrar_for
from tandem.memory.streams import borrow_stream

logger = logging.getLogger(__name__)

GIB = 2**30
_UNLIMITED = 1 << 60
"""Minimum limit that means none in a cgroup v1."""


class Available(NamedTuple):
    """Memory that programs can use without swapping, or being killed."""

    nbytes: int
    of: str
    """Name of the limit's owner, as a subject."""


class _Files(NamedTuple):
    """Names of a memory cgroup's files, and of its field of reclaimable file pages."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def available(root: Path = Path("/")) -> Available:
    """Return the least free memory of the host and each cgroup around this process; ``root`` holds
    the system's files."""
    least = Available(_of_host(root), "this host")
    for files, levels in _cgroups(root):
        for level in levels:
            left = _of_cgroup(level, files)
            if left is not None and left.nbytes < least.nbytes:
                least = left
    return least


def _of_host(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        logger.debug("no MemAvailable in /proc/meminfo; free pages are taken for available")
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_cgroup(level: Path, files: _Files) -> Available | None:
    try:
        limit = int((level / files.limit).read_text())
        used = int((level / files.usage).read_text())
        fields = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
        used -= int(fields[files.reclaimable])
    except (OSError, KeyError, ValueError):  # "max"
        return None
    if limit >= _UNLIMITED:
        return None
    whose = f"the cgroup at {level}, of {limit / GIB:.1f} GiB,"
    return Available(max(limit - max(used, 0), 0), whose)


def _cgroups(root: Path) -> Iterator[tuple[_Files, list[Path]]]:
    """Yield this process's cgroup and those around it, per hierarchy that limits memory."""
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    """Paths by controller; that of cgroup v2 has no name."""
    for line in own:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in mounts:
        before, _, behind = line.partition(" - ")
        top, mount = (_unescaped(each) for each in before.split()[3:5])
        kind, _, options = behind.split()[:3]
        if kind == "cgroup2" and "" in paths:
            yield _V2, _levels(root / mount.lstrip("/"), top, paths[""])
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in paths:
            yield _V1, _levels(root / mount.lstrip("/"), top, paths["memory"])


def _levels(mount: Path, top: str, path: str) -> list[Path]:
    """Return the folders from cgroup ``path`` up to ``mount``, which shows cgroup ``top``; only the
    mount if ``path`` is not below ``top``."""
    prefix = top.rstrip("/") + "/"
    below = path[len(prefix) :] if path.startswith(prefix) else ""
    level = mount / below.lstrip("/")
    levels = [level]
    while level != mount:
        level = level.parent
        levels.append(level)
    return levels


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


STORES_AT_ONCE = 32
"""Blocks stored between two events that a step may wait for."""

Store = tuple[int, int]
"""(device block, host block)."""


class HostBlocks:
    """``num_blocks`` blocks of host memory, for the thread of the steps. Implements
    BlockMedium."""

    def __init__(self, kv_cache: Tensor, num_blocks: int) -> None:
        """``kv_cache`` is [device blocks, block_bytes] uint8. Raises HostMemoryError without enough
        memory."""
        self._kv_cache = kv_cache
        self._queue = _Queue(kv_cache.device)
        size = kv_cache.shape[1]
        self._memory = HostMemory(num_blocks * size, registrar_for(kv_cache.device))
        self.blocks: Tensor = self._memory.tensor.view(num_blocks, size)
        """[num_blocks, block_bytes] uint8."""
        self._under_way: list[tuple[int, DeviceEvent, str | None]] = []
        """Loads in order: (ticket, event after its copies, reason of failure or None)."""

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def is_storing(self) -> bool:
        """Return whether a step that writes blocks may have to wait."""
        return self._queue.is_storing

    def begin(self, transfers: BlockTransfers, written: AbstractSet[int]) -> DeviceEvent | None:
        """Queue a step's transfers before the step, which writes the blocks ``written``. Return the
        event after all stores so far, or None if that is before the step."""
        stored = self._queue.store(transfers.stores, written, self._store)
        if transfers.loads:
            with self._queue.loads():
                for load in transfers.loads:
                    why = self._fill(load)
                    self._under_way.append((load.ticket, moment(self._kv_cache.device), why))
        return stored

    def report(self, *, wait: bool, seconds: float = WAIT_SECONDS) -> TransferReport | None:
        """Return loads ended since the last call; ``wait`` for all. Raises TimeoutError."""
        if not self._under_way:
            return None
        loaded, failed = [], []
        while self._under_way:
            ticket, there, why = self._under_way[0]
            if wait:
                there.wait(seconds)
            elif not there.done():
                break
            del self._under_way[0]
            if why is None:
                loaded.append(ticket)
            else:
                failed.append((ticket, why))
        return TransferReport(tuple(loaded), tuple(failed)) if loaded or failed else None

    def close(self) -> int:
        """Free the memory after the copies in progress; return its bytes."""
        self.blocks = self.blocks[:0].clone()
        return self._memory.free()

    def _store(self, pairs: Sequence[Store]) -> None:
        for block, host in pairs:
            self.blocks[host].copy_(self._kv_cache[block], non_blocking=True)

    def _fill(self, load: BlockLoad) -> str | None:
        try:
            for host, block in load.blocks:
                self._kv_cache[block].copy_(self.blocks[host], non_blocking=True)
        except RuntimeError as error:
            return str(error)
        return None


class _Part(NamedTuple):
    """Stores that run next to the steps."""

    there: OnStream
    blocks: frozenset[int]
    hosts: frozenset[int]


class _Queue:
    """Streams of the copies: that of the steps and two more; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stores: Any = None
        self._loads: Any = None
        self._parts: deque[_Part] = deque()
        """Stores in order for which the stream of the steps has not waited."""
        if device.type == "cuda":
            self._stores = borrow_stream(self, device)
            self._loads = borrow_stream(self, device)

    @property
    def is_storing(self) -> bool:
        """Return whether stores are in progress for which the steps have not waited."""
        while self._parts and self._parts[0].there.done():
            self._parts.popleft()
        return bool(self._parts)

    def store(
        self,
        pairs: Sequence[Store],
        written: AbstractSet[int],
        copy: Callable[[Sequence[Store]], None],
    ) -> DeviceEvent | None:
        """Have ``copy`` queue ``pairs`` after all queued steps. The next step waits only for stores
        of the blocks ``written``. Return the event after all, or None if that is before the next
        step."""
        if self._stores is None:
            copy(pairs)
            return None
        # Before the others on their stream: a decode's new block must not wait for a long prompt.
        first = [pair for pair in pairs if pair[0] in written]
        if self.is_storing:
            self._wait_for(written, [host for _, host in first])
        copy(first)
        later = [pair for pair in pairs if pair[0] not in written] if first else pairs
        if later:
            self._stores.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stores):
                for at in range(0, len(later), STORES_AT_ONCE):
                    part = later[at : at + STORES_AT_ONCE]
                    copy(part)
                    blocks, hosts = map(frozenset, zip(*part, strict=True))
                    self._parts.append(_Part(OnStream(), blocks, hosts))
        return self._parts[-1].there if self._parts else None

    def _wait_for(self, blocks: AbstractSet[int], hosts: Collection[int]) -> None:
        parts = self._parts
        for at in range(len(parts) - 1, -1, -1):
            if not (parts[at].blocks.isdisjoint(blocks) and parts[at].hosts.isdisjoint(hosts)):
                parts[at].there.hold_up(torch.cuda.current_stream(self._device))
                for _ in range(at + 1):
                    parts.popleft()
                return

    @contextmanager
    def loads(self) -> Iterator[None]:
        """Queue the block's copies after all queued steps and stores; no stream waits for them."""
        if self._loads is None:
            yield
            return
        self._loads.wait_stream(torch.cuda.current_stream(self._device))
        self._loads.wait_stream(self._stores)
        with torch.cuda.stream(self._loads):
            yield


def blocks_written(plan: SchedulerOutput, batch: InputBatch) -> set[int]:
    """Return the blocks that a step writes; ``batch`` already has its rows."""
    size = batch.block_size
    written = {to for _, to in plan.block_copies}
    if plan.rows:
        rows = np.array([batch.row_of[row.seq] for row in plan.rows])
        computed = np.array([row.num_computed for row in plan.rows])
        end = computed + np.array([row.num_scheduled_tokens for row in plan.rows])
        first = computed // size
        counts = -(-end // size) - first
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = np.repeat(first, counts) + within
        written.update(batch.table.blocks[:, np.repeat(rows, counts), columns].ravel().tolist())
        written.update(batch.table.states[:, rows].ravel().tolist())
    return written
