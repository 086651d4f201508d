"""Matrices whose rows are tokens: embeddings, and the head that may be the same matrix."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from tandem.engine.config.quantization import GgufScheme, QuantFacts
from tandem.engine.loader import WHOLE, Shard, Weights
from tandem.engine.quant.base import PlainMethod, Product
from tandem.engine.quant.blocks import Backends, BlockProduct
from tandem.engine.quant.dense import stored_type
from tandem.engine.quant.gguf import dense_of, read_blocks
from tandem.kernels.packed_gemm import Packed
from tandem.kernels.packed_gemm.reference import decoded


class Table(Protocol):
    """One matrix [rows, columns] of a rank."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def lookup(self, rows: Tensor) -> Tensor:
        """Return [count, columns] of int64 [count], in new memory and the engine's type."""
        ...

    def product(self) -> Product:
        """Return the product with the rows as outputs."""
        ...


class PlainTable:
    """Floats, of the engine's type or one that it holds exactly."""

    def __init__(self, weight: Tensor, method: PlainMethod, dtype: torch.dtype) -> None:
        self._weight, self._method, self._dtype = weight, method, dtype

    def __len__(self) -> int:
        return len(self._weight)

    def lookup(self, rows: Tensor) -> Tensor:
        return embedding(rows, self._weight).to(self._dtype)

    def product(self) -> Product:
        return self._method.hold(self._weight, None)


class BlockTable:
    """Blocks, of which only the rows in use are decoded."""

    def __init__(self, blocks: Packed, dtype: torch.dtype) -> None:
        self._blocks, self._dtype = blocks, dtype

    def __len__(self) -> int:
        return len(self._blocks.blocks)

    def lookup(self, rows: Tensor) -> Tensor:
        return decoded(self._blocks.blocks.index_select(0, rows), self._blocks.kind, self._dtype)

    def product(self) -> Product:
        return BlockProduct([self._blocks], None, Backends())


def table_of(
    facts: QuantFacts | None,
    plain: PlainMethod,
    source: Weights,
    name: str,
    shape: tuple[int, int],
    shard: Shard = WHOLE,
) -> Table:
    """Return a rank's rows of the matrix ``name``; zeros pad the last rank's. Raises a
    LoadError."""
    scheme = None if facts is None else facts.scheme(name.removesuffix(".weight"))
    if not isinstance(scheme, GgufScheme) or source.spec(name) is None:
        weight = source.get(name, shape, shard, dtype=stored_type(source, name, plain))
        return PlainTable(_padded(weight, shape[0], shard), plain, source.dtype)
    blocks = read_blocks(source, name, shape, shard, scheme.kind)
    blocks = Packed(_padded(blocks.blocks, shape[0], shard), scheme.kind)
    if source.device.type == "cpu":
        return BlockTable(blocks, source.dtype)
    return PlainTable(dense_of([blocks], source.dtype), plain, source.dtype)


def _padded(rows: Tensor, all_rows: int, shard: Shard) -> Tensor:
    missing = -(-all_rows // shard.count) - len(rows)
    return pad(rows, (0, 0, 0, missing)) if missing else rows
