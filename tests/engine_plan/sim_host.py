"""Host memory behind the slab of ``SimExecutor``, whose copies are as late as they may be."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tandem.engine.step import BlockTransfers, TransferReport
from tandem.protocol.kv import Fence

KVCacheMemory = list[list[int | None]]
"""By block, by slot."""


class HostMemory:
    """Blocks beside the slab. Both ways are as late as they may be, so that they hit whoever was
    given a block too early. A store reads the slab when a step is about to write its block, a load
    may want it, or whoever writes past the steps has asked a fence ``asks_to_store`` times in vain.
    A load reads at once, and writes the slab when ``steps_to_land`` results have been given since,
    or when somebody waits for it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.steps_to_land = 0
        self.asks_to_store = self.asked = 0
        self.broken = False
        """Whether loads fail from now on."""
        self._blocks: dict[int, list[int | None]] = {}
        self._stores: deque[tuple[int, int]] = deque()
        """(block, host block) that are yet to be read, in order."""
        self.num_stored = 0
        """Those that were read; without those read at once, ahead of the others."""
        self._loads: list[tuple[int, int, dict[int, list[int | None]] | None]] = []
        """(results to come, ticket, content by block or None where it fails)."""

    @property
    def num_begun(self) -> int:
        return self.num_stored + len(self._stores)

    def begin(self, kv_cache: KVCacheMemory, transfers: BlockTransfers, written: set[int]) -> None:
        """What a step moves that is about to write the blocks ``written``."""
        first = [each for each in transfers.stores if each[0] in written]
        hosts = {host for _, host in first}
        behind = [
            at + 1
            for at, (block, host) in enumerate(self._stores)
            if block in written or host in hosts
        ]
        self.store(kv_cache, max(behind, default=0))
        for block, host in first:
            self._read(kv_cache, block, host)
        self._stores += [each for each in transfers.stores if each[0] not in written]
        if transfers.loads:
            self.store(kv_cache, len(self._stores))
        for load in transfers.loads:
            read = {block: self._blocks[host].copy() for host, block in load.blocks}
            self._loads.append((self.steps_to_land, load.ticket, None if self.broken else read))

    def store(self, kv_cache: KVCacheMemory, count: int) -> None:
        """Read the next ``count`` blocks that are to be stored."""
        for _ in range(count):
            self._read(kv_cache, *self._stores.popleft())
            self.num_stored += 1

    def check_written(self, block: int) -> None:
        """Nobody may write a block that is yet to be read."""
        assert all(block != each for each, _ in self._stores), f"block {block} is yet to be stored"

    def _read(self, kv_cache: KVCacheMemory, block: int, host: int) -> None:
        assert host < self.num_blocks
        self._blocks[host] = kv_cache[block].copy()

    def report(self, kv_cache: KVCacheMemory, *, wait: bool) -> TransferReport | None:
        loaded, failed = [], []
        later = []
        for left, ticket, content in self._loads:
            if left and not wait:
                later.append((left - 1, ticket, content))
            elif content is None:
                failed.append((ticket, "the host's memory is broken"))
            else:
                loaded.append(ticket)
                for block, states in content.items():
                    self.check_written(block)
                    kv_cache[block] = states
        self._loads = later
        return TransferReport(tuple(loaded), tuple(failed)) if loaded or failed else None


@dataclass(frozen=True, slots=True)
class StoreFence:
    memory: HostMemory
    kv_cache: KVCacheMemory
    own: Fence
    stores: int

    def done(self) -> bool:
        memory = self.memory
        left = self.stores - memory.num_stored
        if left > 0:
            memory.asked += 1
            if memory.asked <= memory.asks_to_store:
                return False
            memory.asked = 0
            memory.store(self.kv_cache, left)
        return self.own.done()
