"""Linear layers, alone or merged into one product (q, k and v; gate and up), embeddings, norms and
head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import layer_norm

from tandem.engine.delta import Delta
from tandem.engine.loader import INPUTS, Weights
from tandem.engine.quant import LinearMethod, LinearPart, Product, Rows
from tandem.engine.quant.tables import Table
from tandem.engine.ranks import ALONE, Ranks
from tandem.kernels.activation import Gate, gated
from tandem.kernels.norm import add_layer_norm, rms_norm


class Embedding:
    """Rows of a table by token id, maybe times a factor. Each rank has a slice of the table."""

    def __init__(self, table: Table, factor: float | None = None, *, ranks: Ranks = ALONE) -> None:
        """``table`` is [vocabulary of this rank, hidden]."""
        self._table = table
        self._factor = factor
        self._ranks = ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, hidden] of int64 [tokens], in new memory."""
        found = self._rows(token_ids)
        return found if self._factor is None else found.mul_(self._factor)

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return self._table.lookup(token_ids)
        own = token_ids - self._ranks.rank * len(self._table)
        elsewhere = (own < 0) | (own >= len(self._table))
        found = self._table.lookup(own.masked_fill_(elsewhere, 0))
        return self._ranks.sum(found.masked_fill_(elsewhere[:, None], 0))


class RMSNorm:
    """Norm of the last dimension; the linear layer after it may compute it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * gain + shift, over the last dimension."""

    def __init__(self, gain: Tensor, shift: Tensor, eps: float) -> None:
        self._gain = gain
        self._shift = shift
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed x; sums are float32."""
        return layer_norm(x, self._gain.shape, self._gain, self._shift, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the normed x + residual, both [tokens, hidden]; one kernel on a GPU."""
        return add_layer_norm(x, residual, self._gain, self._shift, self._eps)


class Linear:
    """x @ weight.T + bias, by the method that holds the weight, then a delta, then the sum over
    ranks. A layer without both fuses the product with its neighbours."""

    def __init__(
        self, product: Product, *, delta: Delta | None = None, summed_by: Ranks = ALONE
    ) -> None:
        """``summed_by`` are ranks that each have a part of the inputs."""
        self._product = product
        self._delta = delta
        self._summed_by = summed_by

    @classmethod
    def load(
        cls,
        method: LinearMethod,
        source: Weights,
        parts: Sequence[LinearPart],
    ) -> Linear:
        """Return one layer with the outputs of ``parts`` in order."""
        summed_by = source.ranks if parts[0].shard.dim == INPUTS else ALONE
        return cls(method.load(source, parts), delta=source.delta(parts), summed_by=summed_by)

    def split(self, at: int) -> tuple[Linear, Linear] | None:
        """Return layers of the first ``at`` outputs and of the remaining ones, in the same memory.
        None if the form cannot be cut, or the layer has a delta."""
        if self._delta is not None:
            return None
        first, rest = self._product.part(slice(at)), self._product.part(slice(at, None))
        return None if first is None or rest is None else (Linear(first), Linear(rest))

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Map [tokens, in] to [tokens, out]."""
        return self._product(x, rows) if self._fuses else self.in_float32(x, rows).to(x.dtype)

    def in_float32(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Map [tokens, in] to float32 [tokens, out]."""
        found = self._product.in_float32(x)
        if self._delta is not None:
            found = found.add_(self._delta(x, rows))
        return self._summed_by.sum(found)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Add the layer's output for x to residual [tokens, out] in place; return it."""
        if self._fuses:
            return self._product.add_to(residual, x, rows)
        return residual.add_(self.in_float32(x, rows))

    def of_norm(self, x: Tensor, norm: RMSNorm, rows: Rows | None = None) -> Tensor:
        """Return the output for the normed x."""
        if self._fuses:
            return self._product.of_norm(x, norm.weight, norm.eps, rows)
        return self(norm(x), rows)

    def gated_of_norm(
        self, x: Tensor, norm: RMSNorm, rows: Rows | None = None, gate: Gate = Gate.SILU
    ) -> Tensor:
        """Return gate(first) * second of the normed x; this layer's outputs are two halves."""
        if self._fuses:
            return self._product.gated_of_norm(x, norm.weight, norm.eps, rows, gate)
        return gated(self(norm(x), rows), gate)

    def feed_forward(
        self,
        down: Linear,
        residual: Tensor,
        x: Tensor,
        norm: RMSNorm,
        rows: Rows | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        """Add ``down`` of ``gated_of_norm`` to residual [tokens, hidden] in place; return it."""
        if self._fuses and down._fuses:
            return self._product.feed_forward(
                down._product, residual, x, norm.weight, norm.eps, rows, gate
            )
        return down.add_to(residual, self.gated_of_norm(x, norm, rows, gate), rows)

    @property
    def _fuses(self) -> bool:
        return self._delta is None and self._summed_by.size == 1


class LMHead:
    """Head's product in float32: bfloat16 logits would tie. Each rank has a slice of the
    vocabulary; all get the logits of all."""

    def __init__(self, head: Linear, vocab_size: int, *, ranks: Ranks = ALONE) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._ranks = ranks

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map [rows, hidden] to float32 [rows, vocabulary]."""
        return self._ranks.gather(self._head.in_float32(hidden))[:, : self._vocab_size]
