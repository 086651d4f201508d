"""How a worker introduces itself: what it serves and whether its KV fits another's."""

from enum import StrEnum
from hashlib import blake2b

import msgspec

from tandem.protocol.ids import Incarnation
from tandem.protocol.layout import KVLayout
from tandem.protocol.pooling import ModelPooling

PROTOCOL_VERSION = 4
"""Raised whenever a frame, the hash or the layout changes meaning."""
HANDOFF_VERSION = 8
"""Raised whenever a message between workers, or a slot's header, changes meaning."""
WIRE = f"{PROTOCOL_VERSION}.{HANDOFF_VERSION}"
"""Of routers and workers that serve together: pods of another wire have no link to them."""


class WorkerRole(StrEnum):
    """What a router may place on a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Also takes whole requests, without a hand-off."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's KV is of and how it lies in memory."""

    revision: str
    """Digest of weights and config, as hub/ gave it."""
    dtype: str
    layout: KVLayout
    tensor_parallel_size: int = 1
    version: int = PROTOCOL_VERSION

    @property
    def digest(self) -> str:
        """32 hex digits of all of it: the root of block hashes."""
        fields = msgspec.msgpack.encode(self)
        return blake2b(fields, digest_size=16, person=b"tandem-print").hexdigest()

    @property
    def compatibility(self) -> str:
        """32 hex digits, equal for workers whose KV is of one kind: how many tokens a block of
        theirs has, and among how many ranks a layer's heads are shared, is apart from it."""
        replace = msgspec.structs.replace
        groups = tuple(
            replace(each, num_kv_heads=each.num_kv_heads * self.tensor_parallel_size)
            for each in self.with_block_size(0).layout.groups
        )
        whole = replace(self, layout=KVLayout(groups), tensor_parallel_size=1)
        fields = msgspec.msgpack.encode(whole)
        return blake2b(fields, digest_size=16, person=b"tandem-compat").hexdigest()

    def with_block_size(self, block_size: int) -> "Fingerprint":
        """That of a worker which differs in nothing but the tokens of its blocks."""
        replace = msgspec.structs.replace
        groups = tuple(replace(each, block_size=block_size) for each in self.layout.groups)
        return replace(self, layout=KVLayout(groups))


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What ``EngineCoreClient.describe`` answers and a worker's WELCOME carries."""

    model: str
    """Name under which the model is served."""
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
    """None for an engine inside this process."""
    incarnation: Incarnation | None = None
    control: str | None = None
    """``host:port`` of the control socket, as peers can reach it, of a worker that hands over: a
    prefill worker, or any that lends cached blocks."""
    max_handoff_tokens: int | None = None
    """Tokens of the longest prompt that a prefill worker hands over: what its lease quota holds.
    None: no limit but ``max_model_len``."""
    pull_peers: int = 0
    """Workers, beside those that it takes hand-offs from, to which it keeps links so that it can
    pull cached prefixes from them."""
    pooling: ModelPooling | None = None
    """What the model gives beside tokens; None from a worker that does not know of it."""
    prompt_embeds: int | None = None
    """Values of each vector of a prompt that is given as embeddings; None where no such prompts are
    taken."""
    prefix_caching: bool = True
    """Whether it caches blocks: without, no prompt's blocks need be hashed before they are sent."""
    ends_choices: bool = False
    """Whether it takes ``Cancel.choices``; False from a worker that does not know of it."""
