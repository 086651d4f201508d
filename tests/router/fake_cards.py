"""Cards of workers that have no model."""

from __future__ import annotations

import msgspec

from tandem.protocol.card import Fingerprint, KVGroup, KVLayout, ModelCard, WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.protocol.pooling import ModelPooling

_GROUP = KVGroup(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


def fake_card(
    role: WorkerRole,
    incarnation: Incarnation,
    *,
    revision: str = "r1",
    vocab_size: int = 50_000,
    max_model_len: int = 2048,
    max_handoff_tokens: int | None = None,
    max_logprobs: int = 20,
    port: int | None = None,
    pooling: ModelPooling | None = None,
    prompt_embeds: int | None = None,
    block_size: int = 16,
    pull_peers: int = 0,
) -> ModelCard:
    """The card of a worker that has no model; ``port``, if it hands over or lends, of its control
    socket."""
    gives = role is WorkerRole.PREFILL or pull_peers > 0
    layout = KVLayout((msgspec.structs.replace(_GROUP, block_size=block_size),))
    fingerprint = Fingerprint(revision=revision, dtype="float32", layout=layout)
    return ModelCard(
        model="fake",
        fingerprint=fingerprint,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=1000,
        vocab_size=vocab_size,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_logprobs=max_logprobs,
        role=role,
        incarnation=incarnation,
        control=f"10.0.0.1:{port}" if gives and port is not None else None,
        max_handoff_tokens=max_handoff_tokens,
        pooling=pooling,
        prompt_embeds=prompt_embeds,
        pull_peers=pull_peers,
        ends_choices=True,
    )
