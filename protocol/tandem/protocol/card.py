"""Model cards: a worker's served model, and a fingerprint of its KV's compatibility."""

import math
from enum import StrEnum
from hashlib import blake2b

import msgspec

from tandem.protocol.ids import Incarnation
from tandem.protocol.pooling import ModelPooling

FP8_CODES = "float8_e4m3fn"
"""Type of KV that is held as codes, each times a scale of the model."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8_CODES: 1}


class KVKind(StrEnum):
    """Content of a group's blocks."""

    FULL = "full_attention"
    """Keys and values of every token."""
    WINDOW = "sliding_window"
    """Keys and values, of which only the last ``span`` tokens are attended to."""
    LATENT = "latent"
    """One vector for every token, of which a layer's keys and values are made; ranks hold it
    whole."""
    STATE = "recurrent_state"
    """One state, which each token overwrites."""
    DRAFT = "draft"
    """Keys and values of every token, of the layers that draft."""
    ENCODER = "encoder_output"
    """Output of an encoder, at ``span`` positions."""


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV of ``block_size`` tokens is one block, with one rule for the required blocks.

    A layout may have several groups of one kind. A recurrent state is one block for any number of
    tokens. Raises ValueError if ``span`` is missing, or given for a ``kind`` without one.
    """

    num_layers: int
    num_kv_heads: int
    """KV heads of one rank; of a state its heads; 1 of a latent."""
    head_dim: int
    """Numbers of a head's key or value, or of a latent; of a state those of a head's whole
    state."""
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
        """Return ``[layer, K|V, kv_head, token, head_dim]``; a latent has no V, a state no V and
        one token."""
        two = 1 if self.kind in (KVKind.LATENT, KVKind.STATE) else 2
        tokens = 1 if self.kind is KVKind.STATE else self.block_size
        return (self.num_layers, two, self.num_kv_heads, tokens, self.head_dim)

    def shard(self, of: "Shard") -> "Shard":
        """Return the part of the heads that the rank ``of`` holds: all of a latent."""
        return Shard() if self.kind is KVKind.LATENT else of

    @property
    def num_rows(self) -> int:
        """Return the contiguous runs of tokens in a block: one per layer, K or V, and head."""
        return math.prod(self.block_shape[:3])

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one of ``num_rows``."""
        return math.prod(self.block_shape[3:]) * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Return the bytes per token over all layers; 0 for a state."""
        return 0 if self.kind is KVKind.STATE else self.block_bytes // max(1, self.block_size)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block over all layers."""
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]


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
    """The groups of one rank's KV cache. All blocks have one size, so that groups share them."""

    groups: tuple[KVGroup, ...]

    @property
    def block_size(self) -> int:
        """Return the tokens per block, equal in all groups."""
        return self.groups[0].block_size

    @property
    def block_bytes(self) -> int:
        """Return the bytes of any block: the largest group's, in whole rows of every group."""
        unit = math.lcm(*(each.row_bytes for each in self.groups)) or 1
        return -(-max(each.block_bytes for each in self.groups) // unit) * unit

    @property
    def growing(self) -> tuple[KVGroup, ...]:
        """Return the groups whose blocks grow with a long prompt; all, if none does."""
        bounded = (KVKind.WINDOW, KVKind.STATE)
        return tuple(each for each in self.groups if each.kind not in bounded) or self.groups

    @property
    def token_bytes(self) -> int:
        """Return the bytes that each token of a long prompt adds."""
        return sum(each.token_bytes for each in self.growing)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)


PROTOCOL_VERSION = 4
"""Increased whenever a frame, the hash or the layout changes meaning."""
HANDOFF_VERSION = 10
"""Increased whenever a message between workers, or a slot's header, changes meaning."""
WIRE = f"{PROTOCOL_VERSION}.{HANDOFF_VERSION}"
"""Version of routers and workers that can serve together."""


class WorkerRole(StrEnum):
    """Kinds of legs that a router may place on a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Also for whole requests, without a hand-off."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a worker's KV: weights, dtype and memory layout."""

    revision: str
    """Digest of weights and config."""
    dtype: str
    layout: KVLayout
    tensor_parallel_size: int = 1
    version: int = PROTOCOL_VERSION

    @property
    def digest(self) -> str:
        """Return 32 hex digits over all fields: the root of block hashes."""
        fields = msgspec.msgpack.encode(self)
        return blake2b(fields, digest_size=16, person=b"tandem-print").hexdigest()

    @property
    def compatibility(self) -> str:
        """Return 32 hex digits that are equal for workers with compatible KV.

        Block size and the number of ranks that share a layer's heads are excluded. So are codes
        instead of the model's type, because a hand-off converts them.
        """
        replace, ranks = msgspec.structs.replace, Shard(0, self.tensor_parallel_size)
        groups = tuple(
            replace(
                each,
                num_kv_heads=each.num_kv_heads * each.shard(ranks).size,
                dtype=self.dtype if each.dtype == FP8_CODES else each.dtype,
            )
            for each in self.with_block_size(0).layout.groups
        )
        whole = replace(self, layout=KVLayout(groups), tensor_parallel_size=1)
        fields = msgspec.msgpack.encode(whole)
        return blake2b(fields, digest_size=16, person=b"tandem-compat").hexdigest()

    def with_block_size(self, block_size: int) -> "Fingerprint":
        replace = msgspec.structs.replace
        groups = tuple(replace(each, block_size=block_size) for each in self.layout.groups)
        return replace(self, layout=KVLayout(groups))


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``EngineCoreClient.describe``, and content of a worker's WELCOME."""

    model: str
    fingerprint: Fingerprint
    max_model_len: int
    """Prompt and output tokens together."""
    block_size: int
    num_blocks: int
    """Blocks that requests may use."""
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    role: WorkerRole | None = None
    """Role of the worker; None for an engine inside this process."""
    incarnation: Incarnation | None = None
    control: str | None = None
    """``host:port`` of the control socket of workers that lend KV, as peers can reach it."""
    max_handoff_tokens: int | None = None
    """Maximum prompt tokens of a hand-off; None: limited by ``max_model_len`` only."""
    pull_peers: int = 0
    """Links for pulling cached prefixes, in addition to those of hand-offs."""
    pooling: ModelPooling | None = None
    """Tasks of the model other than generation. None from older workers."""
    prompt_embeds: int | None = None
    """Vector length of a prompt of embeddings. None if such prompts are refused."""
    prefix_caching: bool = True
    """Whether blocks are cached; if not, prompts need no hashes."""
    ends_choices: bool = False
    """Whether ``Cancel.choices`` is supported. False from older workers."""
