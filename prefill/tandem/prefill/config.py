"""The prefill worker's own settings."""

from dataclasses import dataclass

from tandem.engine.config import EngineConfig
from tandem.protocol.settings import check_integer, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """How a prompt is cut so that its KV travels while the rest is computed."""

    prefill_chunk_tokens: int = setting(
        512,
        "Tokens of one prompt in one step, at most: what is computed can be sent meanwhile.",
        unit="tokens",
    )

    def __post_init__(self) -> None:
        check_integer("prefill_chunk_tokens", self.prefill_chunk_tokens, 16)


def chunked(config: EngineConfig, prefill: PrefillConfig) -> EngineConfig:
    """``config`` with chunks of whole blocks, unless the user set a threshold himself.

    A chunk that ends inside a block would leave that block to be sent with the next one.
    """
    if config.scheduler.long_prefill_token_threshold is not None:
        return config
    size = config.cache.block_size
    chunk = max(size, prefill.prefill_chunk_tokens // size * size)
    budget = config.scheduler.max_num_batched_tokens
    return config.with_(long_prefill_token_threshold=min(chunk, budget))
