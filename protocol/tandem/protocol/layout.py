"""Memory layout of KV blocks, which both ends of a hand-off compare.

One KV cache per rank: ``[block][layer][K|V][kv_head][token][head_dim]``. A block is one contiguous
extent; so are slices of heads.
"""

from enum import StrEnum

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class KVKind(StrEnum):
    """Content of a group's blocks."""

    FULL = "full_attention"
    """Keys and values of every token."""
    WINDOW = "sliding_window"
    """Keys and values, of which only the last ``span`` tokens are attended to."""
    LATENT = "latent"
    """One latent vector for every token."""
    STATE = "recurrent_state"
    """One state, which each token overwrites."""
    DRAFT = "draft"
    """Keys and values of every token, of the layers that draft."""
    ENCODER = "encoder_output"
    """Output of an encoder, at ``span`` positions."""


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block shape and one rule for the required blocks.

    Raises ValueError if ``span`` is missing, or given for a ``kind`` without one.
    """

    num_layers: int
    num_kv_heads: int
    """KV heads of one rank."""
    head_dim: int
    block_size: int
    dtype: str
    kind: KVKind = KVKind.FULL
    span: int | None = None
    """Tokens of a sliding window, or positions of an encoder's output; None for other kinds."""

    def __post_init__(self) -> None:
        spans = self.kind in (KVKind.WINDOW, KVKind.ENCODER)
        if spans != (self.span is not None) or (self.span is not None and self.span < 1):
            allowed = "at least 1" if spans else "none"
            raise ValueError(f"span of a {self.kind} group: {self.span}; allowed is {allowed}")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Return ``[layer, K|V, kv_head, token, head_dim]``."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def num_rows(self) -> int:
        """Return the contiguous runs of tokens in a block: one per layer, K or V, and head."""
        return self.num_layers * 2 * self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        """Return the bytes per token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block over all layers."""
        return self.token_bytes * self.block_size


class Shard(msgspec.Struct, frozen=True):
    """Rank of ``size`` ranks that each hold an equal number of a layer's heads."""

    rank: int = 0
    size: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def heads(self, num_kv_heads: int) -> range:
        """Return this rank's heads; ``num_kv_heads`` is a multiple of ``size``."""
        own = num_kv_heads // self.size
        return range(self.rank * own, (self.rank + 1) * own)


class KVLayout(msgspec.Struct, frozen=True):
    """The groups of one rank's KV cache, in KV cache order."""

    groups: tuple[KVGroup, ...]

    @property
    def block_size(self) -> int:
        """Return the tokens per block, equal in all groups."""
        return self.groups[0].block_size

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block over all groups."""
        return sum(group.block_bytes for group in self.groups)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)
