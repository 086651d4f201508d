"""Token embeddings."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import embedding


class Embedding:
    """Rows of a table by token id."""

    def __init__(self, weight: Tensor) -> None:
        """``weight`` [vocabulary, hidden]; may lie in a mapped file."""
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [tokens] to [tokens, hidden], fresh memory."""
        return embedding(token_ids, self.weight)
