"""Model cards: a worker's served model, and a fingerprint of its KV's compatibility."""

from enum import StrEnum
from hashlib import blake2b

import msgspec

from tandem.protocol.ids import Incarnation
from tandem.protocol.layout import KVLayout
from tandem.protocol.pooling import ModelPooling

PROTOCOL_VERSION = 4
"""Increased whenever a frame, the hash or the layout changes meaning."""
HANDOFF_VERSION = 8
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

        Block size and the number of ranks that share a layer's heads are excluded.
        """
        replace = msgspec.structs.replace
        groups = tuple(
            replace(each, num_kv_heads=each.num_kv_heads * self.tensor_parallel_size)
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
