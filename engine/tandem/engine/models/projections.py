"""Projections whose tensors differ from Llama's: several in one tensor, and heads in which other
pairs of numbers are rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tandem.engine.layers.linear import Linear, RMSNorm
from tandem.engine.layers.rotary import rotary_order, rotated_dim
from tandem.engine.loader import LinearPart, LoadError, Shard
from tandem.engine.models.registry import DecoderBuilder
from tandem.engine.quant import Rows
from tandem.engine.quant.base import merged_bias


@dataclass(frozen=True, slots=True)
class FusedShard(Shard):
    """A rank's outputs of one of the layers that share a tensor."""

    first: int = 0
    """First output of the layer."""
    outputs: int = 0
    """Outputs of the layer, of which each rank has equally many."""
    total: int = 0
    """Outputs of the tensor."""
    ranks: int = 1

    def span(self, name: str, extent: int, unit: int = 1) -> slice:
        """Return the part of ``extent`` rows that are all outputs or their scales. Raises
        LoadError."""
        start, rest = divmod(self.first * extent, self.total)
        size, more = divmod(self.outputs * extent, self.total * self.ranks)
        if rest or more or start % unit or size % unit:
            last = self.first + self.outputs - 1
            raise LoadError(
                f"{name}: outputs {self.first} to {last} of {self.total} cannot be cut into "
                f"{self.ranks} parts of whole blocks"
            )
        return slice(start + self.rank * size, start + (self.rank + 1) * size)


class ReorderedLinear(Linear):
    """Layer whose outputs are put into another order."""

    def __init__(self, inner: Linear, order: Tensor) -> None:
        """``order`` is int64 [out], the output of ``inner`` at each place."""
        self._inner = inner
        self._order = order

    def split(self, at: int) -> None:
        return None

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self._inner(x, rows).index_select(1, self._order)

    def in_float32(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return self._inner.in_float32(x, rows).index_select(1, self._order)

    def of_norm(self, x: Tensor, norm: RMSNorm, rows: Rows | None = None) -> Tensor:
        return self._inner.of_norm(x, norm, rows).index_select(1, self._order)


@dataclass(frozen=True, slots=True)
class ProjectionBuilder(DecoderBuilder):
    """Builder that loads parts of fused tensors, and q and k in the order of their rotation."""

    interleaved: ClassVar[bool] = False
    """Whether the checkpoint's layers rotate number 2 i with 2 i + 1."""

    def fused(self, prefix: str, outs: Sequence[int]) -> list[LinearPart]:
        """Return the layers of ``outs`` outputs each that share one tensor, in its order."""
        ranks, total, found, first = self.weights.ranks, sum(outs), [], 0
        for out in outs:
            shard = FusedShard(
                rank=ranks.rank,
                count=len(outs) * ranks.size,
                first=first,
                outputs=out,
                total=total,
                ranks=ranks.size,
            )
            found.append(LinearPart(prefix, (total, self.facts.hidden_size), shard=shard))
            first += out
        return found

    def qkv(self, prefix: str) -> Linear:
        """Return the projection to q, k and v. Rows of plain weights are put into the order of the
        rotation when they are loaded, outputs of other forms at each step."""
        parts, weights = self.qkv_parts(prefix), self.weights
        if not self.interleaved and self.facts.rope.partial == 1.0:
            return Linear.load(self.method, weights, parts)
        order = self.order()
        if self.method is not self.plain or weights.delta(parts) is not None:
            return ReorderedLinear(Linear.load(self.method, weights, parts), order)
        rows = torch.cat([weights.get(f"{p.prefix}.weight", p.shape, p.shard) for p in parts])
        bias = merged_bias(weights, parts)
        return Linear(self.plain.hold(rows[order], None if bias is None else bias[order]))

    def order(self) -> Tensor:
        """Return int64 [out]: the output of the checkpoint at each place of this rank's q, k and
        v."""
        facts, ranks = self.facts, self.weights.ranks.size
        dim, half = facts.head_dim, rotated_dim(facts) // 2
        pairs = torch.arange(dim)
        if self.interleaved:
            pairs[: 2 * half] = pairs[: 2 * half].view(half, 2).T.flatten()
        heads = torch.arange((facts.num_heads + facts.num_kv_heads) // ranks).unsqueeze(1) * dim
        rotated = (heads + pairs[rotary_order(facts)]).flatten()
        values = torch.arange(dim * facts.num_kv_heads // ranks) + len(rotated)
        return torch.cat((rotated, values)).to(self.weights.device)
