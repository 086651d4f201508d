"""Settings of the KV cache and of a GPU."""

from dataclasses import dataclass

from tandem.base.settings import (
    check_choices,
    check_flag,
    check_integer,
    check_optional_integer,
    check_positive,
    check_share,
    setting,
)
from tandem.engine.config.model import DTYPES
from tandem.protocol.errors import InvalidParameter

"""Upper bound of a device's stated operations or bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUConfig:
    """Graphs and attention on a GPU."""

    attention_backend: str = setting(
        "auto",
        "Attention kernels. auto: the preferred ones for the device.",
        choices=("auto", "torch", "triton"),
    )
    enforce_eager: bool = setting(False, "Launch single kernels instead of CUDA graphs.")
    max_cudagraph_capture_size: int | None = setting(
        None,
        "Tokens of the largest step with a CUDA graph. Default: 2048; for an encoder, the "
        "largest step.",
        unit="tokens",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_flag("enforce_eager", self.enforce_eager)
        if self.max_cudagraph_capture_size is not None:
            check_integer("max_cudagraph_capture_size", self.max_cudagraph_capture_size, 1)


BLOCK_SIZES = (16, 32, 64, 128, 256)
CPU_BLOCK_SIZE = 16
GPU_BLOCK_SIZE = 64
FP8 = "fp8"
"""Setting of KV as codes of ``float8_e4m3fn``."""
MOST_OFFLOADED_GIB = 2**20
"""Upper bound of the setting; the machine's memory is checked at allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache of one worker."""

    block_size: int = setting(
        CPU_BLOCK_SIZE,
        f"Tokens per KV block, a power of two from 16 to 256. Default on GPUs: {GPU_BLOCK_SIZE}.",
        unit="tokens",
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        "Number of KV blocks. Default: as many as fit in memory.",
        unit="blocks",
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "Memory for KV per rank. It has precedence over gpu_memory_utilization.", unit="bytes"
    )
    gpu_memory_utilization: float = setting(
        0.9, "Share of a device's memory for weights, activations and KV together."
    )
    enable_prefix_caching: bool = setting(
        True, "Keep the KV of finished requests and reuse it for equal prefixes."
    )
    kv_offloading_size: float | None = setting(
        None,
        "Host memory for evicted KV blocks, over all ranks. Equal prefixes are loaded from it. "
        "Default: no offloading.",
        unit="GiB",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Type of KV. auto, or the name of the model's type (dtype); fp8: float8_e4m3fn by the "
        "scales in the checkpoint, half the bytes of bfloat16.",
        choices=("auto", *DTYPES, FP8),
    )

    def __post_init__(self) -> None:
        if isinstance(self.block_size, bool) or self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise InvalidParameter("block_size", self.block_size, f"one of {sizes}")
        check_optional_integer("num_gpu_blocks_override", self.num_gpu_blocks_override, 1)
        check_optional_integer("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        check_share("gpu_memory_utilization", self.gpu_memory_utilization, above_zero=True)
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        if self.kv_offloading_size is not None:
            check_positive("kv_offloading_size", self.kv_offloading_size, MOST_OFFLOADED_GIB)
            if not self.enable_prefix_caching:
                allowed = "none without enable_prefix_caching: only cached blocks are offloaded"
                raise InvalidParameter("kv_offloading_size", self.kv_offloading_size, allowed)
        check_choices(self)
