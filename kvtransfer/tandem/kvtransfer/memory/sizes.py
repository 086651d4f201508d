"""Size of slots and number of parts ahead, if the settings leave them open. Pure.

A part costs both ends some milliseconds of their interpreters whatever its size, so small parts are
slow. KV of 8B weights moved at 4 GB/s under load with parts of one 9 MiB block, and at 13 with
parts of 64 MiB (bench/results/pair_h200.md). KV of 30,000 tokens alone moved at 110 GB/s with 79
MiB, and at 211 with 128 (pair_h100.md). Slots of a GPU's blocks in host memory are copied by the
GPU and by sockets' threads, and three blocks a part were far faster than one
(handoffs_tcp_h200.md). Between CPUs copies dominate, and small slots stay in caches.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.header import HEADER_BYTES

PAGE = mmap.PAGESIZE
HOST_SLOT_BYTES = 4 << 20
HOST_CREDITS = 4
STAGED_SLOT_BYTES = 32 << 20
GPU_SLOT_BYTES = 128 << 20
GPU_CREDITS = 6
GPU_SHARE = 64
"""Divisor of the GPU memory: a worker's slots take at most 1/64 of it."""


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Sizes of one worker's slots that follow from its settings."""

    slot_bytes: int
    credits: int


def slot_bytes_for(wanted: int, block_bytes: int) -> int:
    """Return the bytes of a slot: ``wanted``, at least one block and the header, in whole pages."""
    return -(-max(wanted, HEADER_BYTES + block_bytes) // PAGE) * PAGE


def slot_sizes(
    config: KVTransferConfig,
    block_bytes: int,
    *,
    count: int,
    gpu_bytes: int | None,
    staged: bool = False,
) -> SlotSizes:
    """Return the sizes of ``count`` slots for blocks of ``block_bytes``. ``gpu_bytes`` is the
    memory of the GPU that holds the slots, None for host memory. ``staged``: the blocks are on a
    GPU.
    """
    if gpu_bytes is None:
        wanted, ahead = STAGED_SLOT_BYTES if staged else HOST_SLOT_BYTES, HOST_CREDITS
    else:
        wanted, ahead = min(GPU_SLOT_BYTES, gpu_bytes // GPU_SHARE // count), GPU_CREDITS
    if config.kv_slot_bytes is not None:
        wanted = config.kv_slot_bytes
    return SlotSizes(slot_bytes_for(wanted, block_bytes), config.kv_credits or ahead)
