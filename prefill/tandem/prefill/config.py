"""The prefill worker's own settings."""

from dataclasses import dataclass

from tandem.engine.config import EngineConfig
from tandem.protocol.settings import check_optional_integer, setting

GPU_CHUNK = 2048
CPU_CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """How a prompt is cut so that its KV travels while the rest is computed."""

    prefill_chunk_tokens: int | None = setting(
        None,
        "Tokens of one prompt in one step, at most: what is computed can be sent meanwhile. None "
        f"is {GPU_CHUNK} on a GPU, where a step of fewer costs more than it brings, {CPU_CHUNK} on "
        "a CPU.",
        unit="tokens",
    )

    def __post_init__(self) -> None:
        check_optional_integer("prefill_chunk_tokens", self.prefill_chunk_tokens, 16)


def chunked(config: EngineConfig, prefill: PrefillConfig) -> EngineConfig:
    """``config`` with chunks of whole blocks, unless the user set a threshold himself.

    A chunk that ends inside a block would leave that block to be sent with the next one.
    """
    if config.scheduler.long_prefill_token_threshold is not None:
        return config
    size = config.cache.block_size
    wanted = prefill.prefill_chunk_tokens or (GPU_CHUNK if config.device == "cuda" else CPU_CHUNK)
    chunk = max(size, wanted // size * size)
    budget = config.scheduler.max_num_batched_tokens
    return config.with_(long_prefill_token_threshold=min(chunk, budget))
