"""Host memory behind a rank's slab, and the copies between the two, in the order of steps.

On a GPU the memory is page-locked, and stores and loads run on a stream each: a step waits for what
is stored of blocks that it may write, and for nothing that is loaded, since no step reads that
before the host has seen it land. Nor does a store wait for loads: whoever plans them keeps both
blocks of a load from everybody until it has ended. A block is one extent, so it is one copy. On a
CPU everything is done when it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.engine.step import BlockLoad, BlockTransfers, TransferReport
from tandem.engine.worker.moments import WAIT_SECONDS, Moment, moment
from tandem.kernels.memory.page_locked import HostMemory, registrar_for


class HostBlocks:
    """``num_blocks`` blocks of host memory; called from the thread of the steps."""

    def __init__(self, slab: Tensor, num_blocks: int) -> None:
        """``slab`` is [device blocks, block_bytes] uint8. Raises HostMemoryError where memory is
        short."""
        self._slab = slab
        self._queue = _Queue(slab.device)
        size = slab.shape[1]
        self._memory = HostMemory(num_blocks * size, registrar_for(slab.device))
        self.blocks: Tensor = self._memory.tensor.view(num_blocks, size)
        """[num_blocks, block_bytes] uint8."""
        self._under_way: list[tuple[int, Moment, str | None]] = []
        """(ticket, behind its copies, why it fails or None), in order."""

    def begin(self, transfers: BlockTransfers) -> None:
        """Queue what a step moves, behind all that was launched and before the step itself."""
        if transfers.stores:
            with self._queue.stores():
                for block, host in transfers.stores:
                    self.blocks[host].copy_(self._slab[block], non_blocking=True)
        if transfers.loads:
            with self._queue.loads():
                for load in transfers.loads:
                    why = self._fill(load)
                    self._under_way.append((load.ticket, moment(self._slab.device), why))

    def report(self, *, wait: bool, seconds: float = WAIT_SECONDS) -> TransferReport | None:
        """Loads that have ended since the last call; ``wait`` for all. Raises TimeoutError."""
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
        """Give the memory back when the copies that are under way have ended; how many bytes."""
        self.blocks = self.blocks[:0].clone()
        return self._memory.free()

    def _fill(self, load: BlockLoad) -> str | None:
        """Queue a load's copies; why not all of them, or None."""
        try:
            for host, block in load.blocks:
                self._slab[block].copy_(self.blocks[host], non_blocking=True)
        except RuntimeError as error:
            return str(error)
        return None


class _Queue:
    """Where copies are queued: two streams beside that of the steps, or nowhere on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stores: Any = None
        self._loads: Any = None
        if device.type == "cuda":
            self._stores = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._loads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def stores(self) -> Iterator[None]:
        """Queue what is said within the block behind all that steps have queued; they go on behind
        it."""
        if self._stores is None:
            yield
            return
        steps = torch.cuda.current_stream(self._device)
        self._stores.wait_stream(steps)
        with torch.cuda.stream(self._stores):
            yield
        steps.wait_stream(self._stores)

    @contextmanager
    def loads(self) -> Iterator[None]:
        """Queue what is said within the block behind all that steps and stores have queued: loads
        fill blocks that were read there, from blocks that were written. No stream waits for it."""
        if self._loads is None:
            yield
            return
        self._loads.wait_stream(torch.cuda.current_stream(self._device))
        self._loads.wait_stream(self._stores)
        with torch.cuda.stream(self._loads):
            yield
