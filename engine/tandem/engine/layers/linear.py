"""Linear layers, alone or several merged into one product, and what stands around them: the table
of embeddings, norms, and the product with the head.

q, k and v (and gate and up) read the same input: one product over their stacked weights reads it
once and is one call instead of three.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import embedding, layer_norm

from tandem.engine.loader import Weights
from tandem.engine.quant import LinearMethod, LinearPart, Product, Rows
from tandem.kernels.norm import add_layer_norm, rms_norm


class Embedding:
    """Rows of a table by token id."""

    def __init__(self, weight: Tensor) -> None:
        """``weight`` [vocabulary, hidden]; may lie in a mapped file."""
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [tokens] to [tokens, hidden], fresh memory."""
        return embedding(token_ids, self.weight)


class RMSNorm:
    """Norm of the last dimension. Linear layers that follow one take it along."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The normed x."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * gain + shift, over the last dimension."""

    def __init__(self, gain: Tensor, shift: Tensor, eps: float) -> None:
        self._gain = gain
        self._shift = shift
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The normed x; sums are float32."""
        return layer_norm(x, self._gain.shape, self._gain, self._shift, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """The normed x + residual, both [tokens, hidden]; on a GPU by one kernel."""
        return add_layer_norm(x, residual, self._gain, self._shift, self._eps)


class Linear:
    """x @ weight.T + bias, by the method that holds the weight."""

    def __init__(self, product: Product) -> None:
        self._product = product

    @classmethod
    def load(cls, method: LinearMethod, source: Weights, parts: Sequence[LinearPart]) -> Linear:
        """One layer whose outputs are those of ``parts``, side by side in order."""
        return cls(method.load(source, parts))

    def split(self, at: int) -> tuple[Linear, Linear] | None:
        """The first ``at`` outputs and the others as layers of their own, in the same memory; None
        where the form cannot be cut."""
        first, rest = self._product.part(slice(at)), self._product.part(slice(at, None))
        return None if first is None or rest is None else (Linear(first), Linear(rest))

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """[tokens, in] to [tokens, out]."""
        return self._product(x, rows)

    def in_float32(self, x: Tensor) -> Tensor:
        """[tokens, in] to float32 [tokens, out]."""
        return self._product.in_float32(x)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        """residual [tokens, out] += the product of x, in place; returns it."""
        return self._product.add_to(residual, x, rows)

    def of_norm(self, x: Tensor, norm: RMSNorm, rows: Rows | None = None) -> Tensor:
        """The product of the normed x."""
        return self._product.of_norm(x, norm.weight, norm.eps, rows)

    def gated_of_norm(self, x: Tensor, norm: RMSNorm, rows: Rows | None = None) -> Tensor:
        """silu(gate) * up of the normed x, whose gate and up this layer gives side by side."""
        return self._product.gated_of_norm(x, norm.weight, norm.eps, rows)


class LMHead:
    """The head's product in float32: bfloat16 logits of 16 and more are eighths, and tie."""

    def __init__(self, head: Linear) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to float32 [rows, vocabulary]."""
        return self._head.in_float32(hidden)
