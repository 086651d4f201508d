"""Queries and blocks of one step and the score rules of a layer, arguments of the paged ops.

A batch is made once a step. A backend caches values derived from the tensors in `memo`, for all
layers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.narrow.codes import check_pages

SHORT_ROWS = 64
"""Query rows (tokens × query heads of a KV head) up to which a chunk is attended as decodes are, by
a kernel for each power of two of rows."""
LEAST_DIM = 16
"""Minimum head size that matrix units multiply."""
MOST_BYTES = 1024
"""Maximum bytes of a head: 512 numbers in 16 bits, 256 in float32."""
DIM_STEP = 8
"""Divisor of every head size of the kernels: 16 bytes of 16-bit numbers, one load."""
FEW_PAIRS = 64
"""Number of (sequence, KV head) pairs below which Triton's decode kernel has another launch."""


class Scores(NamedTuple):
    """Rules by which a layer scores its keys.

    A score is scale * (q · k), then the soft cap, then the slope.
    """

    scale: float
    window: int | None = None
    """Keys that a query attends to: at position p, those from p - window + 1 to p. None is all."""
    softcap: float | None = None
    """Cap c of scores s, which become c * tanh(s / c)."""
    sinks: Tensor | None = None
    """float32 [heads]: a logit that joins the sum of the softmax and has no value."""
    slopes: Tensor | None = None
    """float32 [heads]: ALiBi adds slope * (position of the key - position of the query)."""

    def check(self, q: Tensor) -> Scores:
        """Return self, or raise BadTensor for the first field that does not fit the queries."""
        if self.window is not None and self.window < 1:
            raise BadTensor(f"window is {self.window}, expected at least 1")
        if self.softcap is not None and not self.softcap > 0:
            raise BadTensor(f"softcap is {self.softcap}, expected above 0")
        for name, values in (("sinks", self.sinks), ("slopes", self.slopes)):
            if values is not None:
                checks.shape(name, values, q.shape[1])
                checks.kind(name, values, torch.float32)
                checks.dense_last(name, values)
                if values.device != q.device:
                    raise BadTensor(f"{name} is on {values.device}, but q is on {q.device}")
        return self

    @property
    def plain(self) -> bool:
        """Return whether scores are only scaled, perhaps in a window."""
        return self.softcap is None and self.sinks is None and self.slopes is None

    def in_log2(self) -> tuple[float, float | None]:
        """Return the factor of q · k and the cap, for kernels whose softmax takes powers of two.

        With a cap the factor also carries the 2 of tanh(x) = 1 - 2 / (1 + e^(2x)).
        """
        if self.softcap is None:
            return self.scale * math.log2(math.e), None
        cap = self.softcap * math.log2(math.e)
        return self.scale / self.softcap * 2 * math.log2(math.e), cap


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequences of one attention call, their queries concatenated."""

    cu_seqlens_q: Tensor
    """int32 [sequences + 1]: queries of sequence s are rows cu_seqlens_q[s] up to the next."""
    seq_lens: Tensor
    """int32 [sequences]: keys of sequence s, cached context and this call's tokens together."""
    block_tables: Tensor
    """int32 [sequences, max_blocks]: blocks in token order. Entries after the last are not read; a
    layer with a window does not read those before it either."""
    max_query_len: int
    """Queries of the longest sequence; 1 in a decode batch."""
    max_seq_len: int
    """Keys of the longest sequence."""
    memo: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.shape[0]

    def check(self) -> PagedBatch:
        """Return self, or raise BadTensor for the first field that does not fit the others."""
        n = self.num_sequences
        checks.shape("cu_seqlens_q", self.cu_seqlens_q, n + 1)
        checks.shape("block_tables", self.block_tables, n, None)
        for name in ("cu_seqlens_q", "seq_lens", "block_tables"):
            checks.kind(name, getattr(self, name), torch.int32)
        if not 0 <= self.max_query_len <= self.max_seq_len:
            raise BadTensor(
                f"max_query_len {self.max_query_len} exceeds max_seq_len {self.max_seq_len}"
            )
        return self


def sequence_class(count: int) -> int:
    """Return the power of four, from 16 on, that holds `count` sequences and selects the plans."""
    most = 16
    while most < count:
        most *= 4
    return most


def in_tiles(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether kernels take a head size: a multiple of 8 within the bounds of matrix units
    and shared memory. Others go to the reference, which a CUDA graph cannot hold."""
    fits = head_dim >= LEAST_DIM and padded(head_dim) * dtype.itemsize <= MOST_BYTES
    return fits and head_dim % DIM_STEP == 0


def padded(head_dim: int) -> int:
    """Return the columns of a kernel's tile: the power of two that holds a head."""
    return 1 << (head_dim - 1).bit_length()


def short_batches(heads: int, kv_heads: int) -> Iterator[tuple[int, int]]:
    """Return (longest query, sequences) of batches that together use every decode kernel of a
    model."""
    queries = 1
    while True:
        yield queries, 1
        if kv_heads < FEW_PAIRS:
            yield queries, -(-FEW_PAIRS // kv_heads)
        queries *= 2
        if queries * heads > SHORT_ROWS * kv_heads:
            return


def check_call(q: Tensor, kv: Tensor, batch: PagedBatch, kv_scales: Tensor | None) -> None:
    """Check that the queries [tokens, heads, head_dim] and pages of one layer fit each other.

    The memo records a check, so that a step's layers share it.
    """
    pages = (kv.shape, kv.stride(), kv.dtype, kv.device)
    scales = None
    if kv_scales is not None:
        scales = (kv_scales.shape, kv_scales.stride(), kv_scales.dtype, kv_scales.device)
    seen = ("checked", q.shape, q.stride(-1), q.dtype, pages, scales)
    if seen not in batch.memo:
        _check_call(q, kv, batch, kv_scales)
        batch.memo[seen] = True


def _check_call(q: Tensor, kv: Tensor, batch: PagedBatch, kv_scales: Tensor | None) -> None:
    checks.shape("kv", kv, None, 2, None, None, q.shape[-1])
    check_pages(kv, kv_scales, "q", q)
    checks.shape("q", q, None, None, kv.shape[4])
    checks.dense_last("q", q)
    if q.shape[1] % kv.shape[2]:
        raise BadTensor(f"q has {q.shape[1]} heads, not a multiple of the {kv.shape[2]} KV heads")
    page = kv.shape[3] * kv.shape[4]
    if kv.stride(4) != 1 or kv.stride(3) != kv.shape[4]:
        raise BadTensor(f"kv has strides {kv.stride()}, expected dense [token][head_dim] pages")
    if any(kv.stride(d) % page for d in (0, 1, 2)):
        raise BadTensor(f"kv has strides {kv.stride()}, expected multiples of a page of {page}")
    if batch.max_seq_len > batch.block_tables.shape[1] * kv.shape[3]:
        raise BadTensor(
            f"block_tables hold {batch.block_tables.shape[1]} blocks of {kv.shape[3]} tokens, "
            f"fewer than max_seq_len {batch.max_seq_len} needs"
        )
