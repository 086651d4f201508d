"""Number of KV blocks of a rank: as set, or as memory allows after the weights are loaded."""

from __future__ import annotations

import logging

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.worker.host_memory import available
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.layout import KVLayout, blocks_for

logger = logging.getLogger(__name__)

CPU_SHARE = 0.25
"""Share of the free memory that KV takes unless set otherwise: other workers use the same host."""
CPU_LIMIT_BYTES = 2 << 30
GIB = 2**30


def num_blocks(
    config: EngineConfig, layout: KVLayout, device: torch.device, *, step_bytes: int = 0
) -> int:
    """Return the blocks to allocate; ``step_bytes`` of a device are kept for steps and graphs.

    Raises InvalidParameter, with a number that would fit, if not even one block fits.
    """
    count = _wanted(config, layout, device, step_bytes)
    if count < 1:
        raise _too_small(config, layout, device, step_bytes)
    logger.info(
        "KV cache: %d tokens in %d blocks of %d, %.2f GiB; %.2f GiB kept for steps",
        count * layout.block_size,
        count,
        layout.block_size,
        count * layout.block_bytes / GIB,
        step_bytes / GIB,
    )
    return count


def num_cpu_blocks(config: EngineConfig, layout: KVLayout, *, promised: int = 0) -> int:
    """Return the blocks of host memory for one rank's share of offloaded KV; 0 without offloading.
    ``promised``: bytes of a CPU's slab, whose pages are not taken before they are used.

    Raises InvalidParameter if not one block fits, or the host or the pod has too little memory.
    """
    size = config.cache.kv_offloading_size
    if size is None:
        return 0
    asked, there = int(size * GIB) // config.parallel.tensor_parallel_size, available()
    if asked < layout.block_bytes:
        allowed = f"at least one block of {layout.block_bytes / GIB:.3g} GiB"
        raise InvalidParameter("kv_offloading_size", size, allowed)
    left = max(there.nbytes - promised, 0)
    if asked > left:
        allowed = f"at most {left / GIB:.1f} GiB, the memory that {there.of} has left"
        if promised:
            allowed += f" beside {promised / GIB:.1f} GiB of blocks"
        raise InvalidParameter("kv_offloading_size", size, allowed)
    count = asked // layout.block_bytes
    logger.info("offloaded KV: %d blocks in host memory, %.2f GiB", count, asked / GIB)
    return count


def _wanted(config: EngineConfig, layout: KVLayout, device: torch.device, step_bytes: int) -> int:
    if config.cache.num_gpu_blocks_override is not None:
        return config.cache.num_gpu_blocks_override
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes // layout.block_bytes
    useful = config.scheduler.max_num_seqs * blocks_for(config.max_model_len, layout.block_size)
    if not layout.block_bytes:
        return useful  # they hold nothing
    on_gpu = device.type == "cuda"
    free = _device_bytes(config, device, step_bytes) if on_gpu else _host_bytes()
    return min(free // layout.block_bytes, useful)


def _device_bytes(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    """Return the bytes left of the device's share after its content and the steps' memory."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * config.cache.gpu_memory_utilization)
    return max(allowed - (total - free) - step_bytes, 0)


def _too_small(
    config: EngineConfig, layout: KVLayout, device: torch.device, step_bytes: int
) -> InvalidParameter:
    bytes_given = config.cache.kv_cache_memory_bytes
    if bytes_given is not None or device.type != "cuda":
        allowed = f"at least one block of {layout.block_bytes:,} bytes fits"
        return InvalidParameter("kv_cache_memory_bytes", bytes_given, allowed)
    free, total = torch.cuda.mem_get_info(device)
    sequence = blocks_for(config.max_model_len, layout.block_size) * layout.block_bytes
    needed = total - free + step_bytes + sequence
    text = (
        f"weights, and what other processes hold, take {(total - free) / GIB:.2f} GiB of the "
        f"device's {total / GIB:.2f}, a step of {config.scheduler.max_num_batched_tokens} tokens "
        f"{step_bytes / GIB:.2f}, one sequence of {config.max_model_len} tokens "
        f"{sequence / GIB:.2f}: "
    )
    if needed <= total:
        text += f"{needed / total + 0.005:.2f} or more holds that"
    else:
        text += "lower max_num_batched_tokens or max_model_len, or take a larger or emptier device"
    return InvalidParameter("gpu_memory_utilization", config.cache.gpu_memory_utilization, text)


def _host_bytes() -> int:
    return min(int(available().nbytes * CPU_SHARE), CPU_LIMIT_BYTES)
