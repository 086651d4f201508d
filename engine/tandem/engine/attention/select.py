"""Selects a worker's attention backend."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, device

from tandem.engine.attention.base import (
    AttentionBackend,
    Metadata,
    StepSequences,
    Support,
)
from tandem.engine.attention.latent import latent_attention
from tandem.kernels import Backend
from tandem.kernels.attention import PagedBatch
from tandem.kernels.attention.batch import Scores
from tandem.kernels.attention.bidirectional import BIDIRECTIONAL, WholePrompts, bidirectional
from tandem.kernels.attention.decode import DECODE, decode
from tandem.kernels.attention.prefill import PREFILL, prefill
from tandem.kernels.mla import MLA_DECODE, MLA_PREFILL
from tandem.kernels.registry import Op
from tandem.protocol.card import KVGroup, KVKind
from tandem.protocol.errors import InvalidParameter


class PagedAttention:
    """Paged ops of one kernel backend; ``None`` takes each op's first choice."""

    def __init__(self, head_dim: int, backend: Backend | None) -> None:
        self.name = "auto" if backend is None else backend.value
        self._backend = backend
        self._scale = float(head_dim**-0.5)

    def supports(self, group: KVGroup, on: device) -> Support:
        if self._backend is None:
            return Support()
        for op in _ops_of(group):
            if self._backend not in op.backends:
                return Support(f"{op.name} has no {self._backend.value} backend")
        if self._backend is not Backend.TORCH and on.type != "cuda":
            return Support(f"{self._backend.value} needs a GPU, not {on.type}")
        return Support()

    def plan(self, step: StepSequences, group: int = 0) -> Metadata:
        """Plan decodes and chunks separately; gather ``logits_rows``."""
        n, tables = step.num_decodes, step.block_tables[group]
        decode_batch = prefill_batch = None
        if n:
            decode_batch = PagedBatch(
                cu_seqlens_q=step.cu_seqlens_q[: n + 1],
                seq_lens=step.seq_lens[:n],
                block_tables=tables[:n],
                max_query_len=1,
                max_seq_len=step.max_decode_len,
            )
        if step.num_chunks:
            prefill_batch = PagedBatch(
                cu_seqlens_q=step.chunk_cu_seqlens_q,
                seq_lens=step.seq_lens[n:],
                block_tables=tables[n:],
                max_query_len=step.max_query_len,
                max_seq_len=step.max_chunk_len,
            )
        return Metadata(n, decode_batch, prefill_batch, _last_queries(step, tables))

    def forward(
        self, q: Tensor, kv: Tensor, meta: Metadata, scores: Scores, kv_scales: Tensor | None
    ) -> Tensor:
        if meta.prefill is None and meta.decode is not None:
            return decode(q, kv, meta.decode, scores, kv_scales, backend=self._backend)
        if meta.decode is None and meta.prefill is not None:
            return prefill(q, kv, meta.prefill, scores, kv_scales, backend=self._backend)
        assert meta.decode is not None, "a step has at least one row"
        assert meta.prefill is not None, "a step has at least one row"
        n = meta.num_decodes
        first = decode(q[:n], kv, meta.decode, scores, kv_scales, backend=self._backend)
        rest = prefill(q[n:], kv, meta.prefill, scores, kv_scales, backend=self._backend)
        return torch.cat((first, rest))

    def latent(self, q: Tensor, kv: Tensor, kv_b: Tensor, meta: Metadata, scale: float) -> Tensor:
        return latent_attention(q, kv, kv_b, meta, scale, backend=self._backend)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, prompts: WholePrompts) -> Tensor:
        return bidirectional(q, k, v, prompts, self._scale, backend=self._backend)


def _ops_of(group: KVGroup) -> tuple[Op[Any], ...]:
    if group.kind is KVKind.LATENT:
        return MLA_PREFILL, MLA_DECODE
    return (PREFILL, DECODE) if group.num_layers else (BIDIRECTIONAL,)


def _last_queries(step: StepSequences, tables: Tensor) -> Metadata | None:
    if step.logits_rows is None:
        return None
    lens = step.seq_lens
    if step.logits_rows.rows is not None:
        lens, tables = (each.index_select(0, step.logits_rows.rows) for each in (lens, tables))
    n = lens.shape[0]
    batch = PagedBatch(
        cu_seqlens_q=step.cu_seqlens_q[: n + 1],
        seq_lens=lens,
        block_tables=tables,
        max_query_len=1,
        max_seq_len=step.logits_rows.max_len,
    )
    return Metadata(n, batch, None)


logger = logging.getLogger(__name__)

_CHOICES = {
    "cuda": (None, Backend.TORCH),
    "cpu": (None, Backend.TORCH),
}
"""Backends by device type, in order; None lets each op take its first choice."""


AUTO = "auto"


def select_backend(groups: Sequence[KVGroup], on: device, name: str = AUTO) -> AttentionBackend:
    """Return the backend ``name``, or for ``auto`` the first that supports all ``groups`` with
    attention on ``on``.

    Raises InvalidParameter with the reason for an unknown or unsupported backend.
    """
    attended = [each for each in groups if each.kind is not KVKind.STATE]
    refusals = []
    for backend in _candidates(attended, on, name):
        reasons = [
            support.reason for each in attended if not (support := backend.supports(each, on)).yes
        ]
        if not reasons:
            logger.info("attention backend: %s", backend.name)
            return backend
        refusals.append(f"{backend.name}: {reasons[0]}")
    known = ", ".join(each.value for each in Backend)
    raise InvalidParameter("attention_backend", name, "; ".join(refusals) or f"one of {known}")


def _candidates(groups: Sequence[KVGroup], on: device, name: str) -> Iterator[AttentionBackend]:
    for choice in Backend if name != AUTO else _CHOICES.get(on.type, (Backend.TORCH,)):
        if name == AUTO or (choice is not None and choice.value == name):
            yield PagedAttention(groups[-1].head_dim, choice)
