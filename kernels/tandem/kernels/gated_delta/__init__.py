"""Linear attention by the gated delta rule, with a causal convolution before it.

One op, as both read and write the same state of a sequence in the KV cache (``packing``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op


class DeltaShape(NamedTuple):
    """Sizes of a layer. Each key head serves consecutive value heads."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    conv_kernel: int

    @property
    def channels(self) -> int:
        """Return the numbers of a token's q, k and v."""
        keys = self.num_key_heads * self.key_dim
        return 2 * keys + self.num_value_heads * self.value_dim

    @property
    def history(self) -> int:
        """Return the earlier tokens that the convolution reads."""
        return self.conv_kernel - 1


@dataclass(frozen=True)
class Spans:
    """Tokens of each row of a step: decodes of one token, then chunks in order."""

    num_decodes: int
    starts: Tensor
    """int64 [rows]: first token of the row."""
    lengths: Tensor
    """int64 [rows]: tokens of the row; 0 in padding."""
    fresh: Tensor
    """bool [rows]: whether the row begins its sequence, so that its state is zero."""
    max_query_len: int
    """Tokens of the longest chunk, or an upper bound."""

    @classmethod
    def of(
        cls, num_decodes: int, chunk_starts: Tensor, seq_lens: Tensor, max_query_len: int
    ) -> Spans:
        """Return the spans of int32 ``chunk_starts`` [chunks + 1], counted from the first chunk's,
        and ``seq_lens`` [rows], cached context and this step's tokens together."""
        bounds = chunk_starts.to(torch.int64)
        alone = torch.arange(num_decodes, device=bounds.device)
        starts = torch.cat((alone, bounds[:-1] + num_decodes))
        lengths = torch.cat((torch.ones_like(alone), bounds.diff()))
        return cls(num_decodes, starts, lengths, seq_lens <= lengths, max_query_len)

    @cached_property
    def longest_first(self) -> Tensor:
        """Return int64 [chunks]: rows of chunks, sorted by length."""
        lengths = self.lengths[self.num_decodes :]
        return lengths.argsort(descending=True, stable=True) + self.num_decodes

    def owners(self, num_tokens: int) -> Tensor:
        """Return the row of each token, int64 [tokens]; any row for padding."""
        tokens = torch.arange(num_tokens, device=self.starts.device)
        ends = self.starts + self.lengths
        return torch.searchsorted(ends, tokens, right=True).clamp_(max=len(ends) - 1)


GatedDelta = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Spans, DeltaShape], Tensor]

GATED_DELTA: Op[GatedDelta] = Op(
    "gated_delta", {Backend.TORCH: "tandem.kernels.gated_delta.reference:gated_delta"}
)


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    conv: Tensor,
    pages: Tensor,
    blocks: Tensor,
    spans: Spans,
    shape: DeltaShape,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Convolve q, k and v, update each row's state and return [tokens, value heads, value_dim].

    Per token S = exp(decay) * S; S += k (beta * (v - k S)); o = q S (Yang et al., 2025, Gated Delta
    Networks), after SiLU of the convolution and L2 norms of q and k; q is also divided by
    sqrt(key_dim). Sums are float32.

    qkv is [tokens, channels]; decay (at most 0) and beta are float32 [tokens, value heads]; conv is
    float32 [channels, conv_kernel]. pages are float32 [num_blocks, value heads, numbers] with the
    state of each row in its block; blocks are int32 [rows]. A row that begins its sequence does not
    read its block.
    """
    tokens, heads = qkv.shape[0], shape.num_value_heads
    checks.shape("qkv", qkv, None, shape.channels)
    checks.shape("conv", conv, shape.channels, shape.conv_kernel)
    checks.shape("pages", pages, None, heads, None)
    checks.shape("blocks", blocks, spans.starts.shape[0])
    checks.kind("blocks", blocks, torch.int32)
    for name, each in (("decay", decay), ("beta", beta)):
        checks.shape(name, each, tokens, heads)
        checks.kind(name, each, torch.float32)
    for name, each in (("conv", conv), ("pages", pages)):
        checks.kind(name, each, torch.float32)
    least = shape.key_dim * shape.value_dim * heads + shape.channels * shape.history
    if pages.shape[2] * heads < least:
        raise BadTensor(f"pages have {pages.shape[2]} numbers a head, too few for {least} in all")
    return GATED_DELTA.on(qkv.device, backend)(qkv, decay, beta, conv, pages, blocks, spans, shape)
