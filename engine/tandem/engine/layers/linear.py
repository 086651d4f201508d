"""Linear layers, alone or merged into one product (q, k and v; gate and up), embeddings, norms and
head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import embedding, layer_norm

from tandem.engine.loader import Weights
from tandem.engine.quant import LinearMethod, LinearPart, Product, Rows
from tandem.kernels.activation import Gate
from tandem.kernels.norm import add_layer_norm, rms_norm


class Embedding:
    """Rows of a table by token id, maybe times a factor."""

    def __init__(self, weight: Tensor, factor: float | None = None) -> None:
        """``weight`` [vocabulary, hidden]; may be in a mapped file."""
        self.weight = weight
        self._factor = factor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, hidden] of int64 [tokens], in new memory."""
        found = embedding(token_ids, self.weight)
        return found if self._factor is None else found.mul_(self._factor)


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
    """x @ weight.T + bias, by the method that holds the weight."""

    def __init__(self, product: Product) -> None:
        self._product = product

    @classmethod
    def load(cls, method: LinearMethod, source: Weights, parts: Sequence[LinearPart]) -> Linear:
        """Return one layer with the outputs of ``parts`` in order."""
        return cls(method.load(source, parts))

    def split(self, at: int) -> tuple[Linear, Linear] | None:
        """Return layers of the first ``at`` outputs and of the remaining ones, in the same memory.
        None if the form cannot be cut."""
        first, rest = self._product.part(slice(at)), self._product.part(slice(at, None))
        return None if first is None or rest is None else (Linear(first), Linear(rest))

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Map [tokens, in] to [tokens, out]."""
        return self._product(x, rows)

    def in_float32(self, x: Tensor) -> Tensor:
        """Map [tokens, in] to float32 [tokens, out]."""
        return self._product.in_float32(x)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Add the product of x to residual [tokens, out] in place; return it."""
        return self._product.add_to(residual, x, rows)

    def of_norm(self, x: Tensor, norm: RMSNorm, rows: Rows | None = None) -> Tensor:
        return self._product.of_norm(x, norm.weight, norm.eps, rows)

    def gated_of_norm(
        self, x: Tensor, norm: RMSNorm, rows: Rows | None = None, gate: Gate = Gate.SILU
    ) -> Tensor:
        """Return gate(first) * second of the normed x; this layer's outputs are two halves."""
        return self._product.gated_of_norm(x, norm.weight, norm.eps, rows, gate)


class LMHead:
    """Head's product in float32: bfloat16 logits would tie."""

    def __init__(self, head: Linear) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map [rows, hidden] to float32 [rows, vocabulary]."""
        return self._head.in_float32(hidden)
