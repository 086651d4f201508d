"""How many blocks a rank holds: as told, or as memory allows once the weights are in it."""

from __future__ import annotations

import logging
import os

import torch

from tandem.engine.config import EngineConfig
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.layout import KVLayout, blocks_for

logger = logging.getLogger(__name__)

CPU_SHARE = 0.25
"""Of a host's available memory, what KV takes unless told otherwise: other workers live there."""
CPU_LIMIT_BYTES = 2 << 30


def num_blocks(config: EngineConfig, layout: KVLayout, device: torch.device) -> int:
    """Blocks to allocate. Raises InvalidParameter if not even one sequence step fits."""
    count = _wanted(config, layout, device)
    if count < 1:
        raise InvalidParameter(
            "kv_cache_memory_bytes",
            config.cache.kv_cache_memory_bytes,
            f"at least one block of {layout.block_bytes:,} bytes fits",
        )
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB",
        count,
        layout.block_size,
        count * layout.block_bytes / 2**30,
    )
    return count


def _wanted(config: EngineConfig, layout: KVLayout, device: torch.device) -> int:
    if config.cache.num_gpu_blocks_override is not None:
        return config.cache.num_gpu_blocks_override
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes // layout.block_bytes
    free = _device_bytes(config, device) if device.type == "cuda" else _host_bytes()
    useful = config.scheduler.max_num_seqs * blocks_for(config.max_model_len, layout.block_size)
    return min(free // layout.block_bytes, useful)


def _device_bytes(config: EngineConfig, device: torch.device) -> int:
    """What the share of the device leaves after weights, as they are now, and activations."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * config.cache.gpu_memory_utilization)
    return max(allowed - (total - free) - _activation_bytes(config), 0)


def _activation_bytes(config: EngineConfig) -> int:
    """Upper bound of a step's own memory: the widest of a layer's tensors, and logits."""
    facts = config.facts
    width = 4 * facts.hidden_size + 3 * facts.intermediate_size
    step = config.scheduler.max_num_batched_tokens * width * 4
    logits = min(config.scheduler.max_num_seqs, 512) * facts.vocab_size * 4 * 3
    return step + logits


def _host_bytes() -> int:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        logger.debug("no MemAvailable in /proc/meminfo; free pages are taken for available")
    return min(int(available * CPU_SHARE), CPU_LIMIT_BYTES)
