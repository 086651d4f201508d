"""The prefill worker's own settings."""

from dataclasses import dataclass

from tandem.base.settings import check_optional_integer, setting
from tandem.engine.config import EngineConfig
from tandem.kvtransfer.config import KVTransferConfig
from tandem.protocol.errors import InvalidParameter

GPU_CHUNK = 2048
CPU_CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Settings of how a prompt is cut so that its KV is sent while the rest is computed."""

    prefill_chunk_tokens: int | None = setting(
        None,
        "Prompt tokens of a step; KV of a chunk is sent while the next is computed. Default:"
        f" {GPU_CHUNK} on a GPU, {CPU_CHUNK} on a CPU.",
        unit="tokens",
    )

    def __post_init__(self) -> None:
        check_optional_integer("prefill_chunk_tokens", self.prefill_chunk_tokens, 16)


def chunked(config: EngineConfig, prefill: PrefillConfig, kv: KVTransferConfig) -> EngineConfig:
    """Return ``config`` with chunks of whole blocks, unless the user set a threshold or it is an
    encoder.

    If the link sends a chunk within milliseconds, a lone prompt is not cut: another step costs
    more.
    """
    if config.facts.encoder is not None:
        if prefill.prefill_chunk_tokens is not None:
            allowed = "none: an encoder computes a prompt in one step"
            raise InvalidParameter("prefill_chunk_tokens", prefill.prefill_chunk_tokens, allowed)
        return config
    scheduler = config.scheduler
    if scheduler.long_prefill_token_threshold is not None:
        return config
    size, budget = config.cache.block_size, scheduler.max_num_batched_tokens
    on_gpu = config.device == "cuda"
    wanted = prefill.prefill_chunk_tokens or (GPU_CHUNK if on_gpu else CPU_CHUNK)
    chunk = min(max(size, wanted // size * size), budget)
    cuts: dict[str, int | None] = {
        "lone_prefill_token_threshold": None,
        "max_num_begun_tokens": chunk if on_gpu else None,
    }
    if on_gpu and prefill.prefill_chunk_tokens is None and copies_blocks(kv):
        cuts["lone_prefill_token_threshold"] = budget // size * size or budget
    return config.with_(long_prefill_token_threshold=chunk, **cuts)


def copies_blocks(kv: KVTransferConfig) -> bool:
    """Return whether workers copy GPU blocks to each other on one machine."""
    near = kv.kv_connector == "auto" and kv.kv_node_folder is not None
    near = near and kv.kv_wire_dtype == "auto"
    return near or kv.kv_connector in ("cuda_p2p", "cuda_p2p_agent")
