"""The interface between a model's attention layers and a device's attention backend.

The runner calls ``plan`` once a step and every layer calls ``forward`` with its result. Keys and
values of the step's tokens are in the cache before ``forward`` (the layer's ``rotary_kv`` wrote
them), so a backend reads pages only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device

from tandem.kernels.attention import PagedBatch
from tandem.kernels.attention.bidirectional import WholePrompts
from tandem.protocol.layout import KVGroup


@dataclass(frozen=True, slots=True)
class Support:
    """Verdict on whether a backend can serve a model on a device."""

    reason: str | None = None
    """Reason why not; None is yes."""

    @property
    def yes(self) -> bool:
        """Return whether the backend can: there is no reason against it."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Metadata:
    """One step's sequences, decodes first; the parts that are empty are None."""

    num_decodes: int
    """Leading tokens that are the one query of their sequence."""
    decode: PagedBatch | None
    prefill: PagedBatch | None
    logits_rows: Metadata | None = None
    """Metadata of the last tokens of StepSequences.logits_rows alone, each one query."""


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Rows of a step whose last token alone goes to the head, each once."""

    rows: Tensor | None
    """int64 [num_logits]; None is all."""
    max_len: int
    """Keys of the longest."""


@dataclass(frozen=True, slots=True)
class StepSequences:
    """Input of a backend's plan: the step's rows in batch order, on the model's device.

    Rows may be padded so that a CUDA graph has fixed shapes. A padded decode has no key, a padded
    chunk no query.
    """

    num_decodes: int
    """Leading rows of one query each."""
    cu_seqlens_q: Tensor
    """int32 [rows + 1]: 0, 1, 2, ..."""
    chunk_cu_seqlens_q: Tensor
    """int32 [chunks + 1]: first query of each other row, counted from the first of them all."""
    seq_lens: Tensor
    """int32 [rows]."""
    block_tables: Tensor
    """int32 [rows, columns]."""
    max_query_len: int
    """Queries of the longest chunk, or a bound of it."""
    max_decode_len: int
    """Keys of the longest decode, or a bound of it."""
    max_chunk_len: int
    """Keys of the longest chunk, or a bound of it."""
    logits_rows: LogitsRows | None = None
    """Rows whose last tokens are all that the head takes; None if it takes others, or all. A
    backend may leave its part of Metadata out: then the layer computes every query."""

    @property
    def num_chunks(self) -> int:
        """Return the number of rows of more than one query."""
        return self.chunk_cu_seqlens_q.shape[0] - 1


class AttentionBackend(Protocol):
    """One way to compute attention over pages."""

    name: str

    def supports(self, group: KVGroup, on: device) -> Support:
        """Return whether the backend can read this layout on the device."""
        ...

    def plan(self, step: StepSequences) -> Metadata:
        """Return the metadata of one step, for all its layers. Never waits for a device."""
        ...

    def forward(self, q: Tensor, kv: Tensor, meta: Metadata) -> Tensor:
        """Return the attention of q [tokens, heads, head_dim] over a layer's pages: dense, as q."""
        ...

    def whole(self, q: Tensor, k: Tensor, v: Tensor, prompts: WholePrompts) -> Tensor:
        """Return the attention of [tokens, heads, head_dim] within each prompt, in both directions,
        in q's shape, dense. No page is read or written."""
        ...
