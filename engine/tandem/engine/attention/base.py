"""Interface between a model's attention layers and a device's attention backend.

``plan`` is called once a step, ``forward`` by each layer. ``rotary_kv`` writes the step's keys and
values first, so a backend only reads pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device

from tandem.kernels.attention import PagedBatch
from tandem.kernels.attention.batch import Scores
from tandem.kernels.attention.bidirectional import WholePrompts
from tandem.protocol.card import KVGroup


@dataclass(frozen=True, slots=True)
class Support:
    """Verdict on whether a backend can serve a model on a device."""

    reason: str | None = None
    """Reason why not; None is yes."""

    @property
    def yes(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Metadata:
    """One step's sequences, decodes first; empty parts are None."""

    num_decodes: int
    """Leading tokens that are the only query of their sequence."""
    decode: PagedBatch | None
    prefill: PagedBatch | None
    logits_rows: Metadata | None = None
    """Metadata for the tokens of StepSequences.logits_rows only, one query each."""


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Rows whose last token is passed to the head, each once."""

    rows: Tensor | None
    """int64 [num_logits]; None is all."""
    max_len: int
    """Keys of the longest row."""


@dataclass(frozen=True, slots=True)
class StepSequences:
    """Input of a backend's plan: the step's rows in batch order, on the model's device.

    Rows may be padded to the shape of a CUDA graph: a decode without keys, a chunk without queries.
    """

    num_decodes: int
    """Leading rows of one query each."""
    cu_seqlens_q: Tensor
    """int32 [rows + 1]: 0, 1, 2, ..."""
    chunk_cu_seqlens_q: Tensor
    """int32 [chunks + 1]: first query of each chunk, counted from the first chunk's."""
    seq_lens: Tensor
    """int32 [rows]."""
    block_tables: Tensor
    """int32 [groups, rows, columns]. Entries before a window are any block."""
    max_query_len: int
    """Queries of the longest chunk, or an upper bound."""
    max_decode_len: int
    """Keys of the longest decode, or an upper bound."""
    max_chunk_len: int
    """Keys of the longest chunk, or an upper bound."""
    states: Tensor | None = None
    """int32 [state groups, rows]: the block of each row's state; None without states."""
    logits_rows: LogitsRows | None = None
    """Rows whose last tokens are all that the head takes, else None. A backend may ignore it; the
    layer then computes every query."""

    @property
    def num_chunks(self) -> int:
        return self.chunk_cu_seqlens_q.shape[0] - 1


class AttentionBackend(Protocol):
    """Attention over pages on one kind of device."""

    name: str

    def supports(self, group: KVGroup, on: device) -> Support: ...

    def plan(self, step: StepSequences, group: int = 0) -> Metadata:
        """Return the metadata of one step, for all layers of a group; never wait for a device."""
        ...

    def forward(
        self, q: Tensor, kv: Tensor, meta: Metadata, scores: Scores, kv_scales: Tensor | None
    ) -> Tensor:
        """Return the attention of q [tokens, heads, head_dim] over a layer's pages, dense, in q's
        shape.

        ``kv_scales`` are factors of codes, float32 [2, kv_heads]; None for pages of q's type.
        """
        ...

    def latent(self, q: Tensor, kv: Tensor, kv_b: Tensor, meta: Metadata, scale: float) -> Tensor:
        """Return the attention of q [tokens, heads, nope + rope] over a layer's pages of latents,
        [tokens, heads, value]. See ``tandem.kernels.mla`` for kv and kv_b."""
        ...

    def whole(self, q: Tensor, k: Tensor, v: Tensor, prompts: WholePrompts) -> Tensor:
        """Return bidirectional attention within each prompt, [tokens, heads, head_dim], without
        pages."""
        ...
