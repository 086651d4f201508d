"""Base of a model's weights: tensors by name, casts, device, and the record of used names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tandem.engine.delta import Delta
from tandem.engine.loader.errors import LoadError
from tandem.engine.loader.files import FLOATS, TYPES, Progress
from tandem.engine.ranks import ALONE, Ranks

OUTPUTS, INPUTS = 0, 1
"""Dimensions of a weight [out, in]."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` equal parts along ``dim``."""

    rank: int = 0
    count: int = 1
    dim: int = OUTPUTS
    uneven: bool = False
    """Whether the last parts may be shorter."""

    def span(self, name: str, extent: int, unit: int = 1) -> slice:
        """Return the part of ``extent`` rows or columns. Raises LoadError if parts must be equal
        multiples of ``unit`` and are not."""
        if self.count == 1:
            return slice(0, extent)
        if self.uneven:
            size = -(-extent // self.count)
            return slice(min(self.rank * size, extent), min((self.rank + 1) * size, extent))
        size, rest = divmod(extent, self.count)
        if rest or size % unit:
            whole = f"parts of a multiple of {unit}" if unit > 1 else "equal parts"
            raise LoadError(f"{name}: {extent} cannot be cut into {self.count} {whole}")
        return slice(self.rank * size, (self.rank + 1) * size)

    def part_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.count == 1:
            return shape
        span = self.span(name, shape[self.dim])
        return (*shape[: self.dim], span.stop - span.start, *shape[self.dim + 1 :])


WHOLE = Shard()


SHOWN = 5


class TensorSpec(NamedTuple):
    """Type and shape of a tensor, known before it is read."""

    dtype: str
    """Name of the type in safetensors."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Linear layer of the checkpoint; several with the same input are loaded as one."""

    prefix: str
    """Names of the layer's tensors up to the last dot."""
    shape: tuple[int, int]
    """(out, in) of the whole layer."""
    bias: bool = False
    shard: Shard = WHOLE

    def read_bias(self, source: Weights) -> Tensor | None:
        """Return the bias [out] of this rank's outputs. If ranks' results are summed, only the
        first has it."""
        if not self.bias:
            return None
        summed = self.shard.count > 1 and self.shard.dim == INPUTS
        shard = WHOLE if summed else self.shard
        bias = source.get(f"{self.prefix}.bias", (self.shape[0],), shard)
        return None if summed and self.shard.rank else bias.clone()


class Weights(ABC):
    """Tensors by name. Use as a context manager, or end with ``check_all_used`` or ``close``."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        ranks: Ranks = ALONE,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        """The rank whose parts are read, and those that share the layers with it."""
        self._progress = progress
        self._used: set[str] = set()

    def shard(self, dim: int, *, uneven: bool = False) -> Shard:
        """Return this rank's part along ``dim``."""
        return Shard(self.ranks.rank, self.ranks.size, dim, uneven)

    @abstractmethod
    def names(self) -> Collection[str]:
        """Return the names of all tensors, sorted; of dummies, those already requested."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Return whether ``get(name)`` would find a tensor; a dummy has every name."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec | None:
        """Return the tensor's type and shape without reading it; None for dummies. Raises
        LoadError."""

    @abstractmethod
    def _read(
        self, name: str, shape: tuple[int, ...] | None, shard: Shard, dtype: torch.dtype | None
    ) -> Tensor:
        """Return the part of the tensor in its source's type. ``dtype`` is that of a tensor that is
        not cast, else None."""

    @abstractmethod
    def _where(self, name: str) -> str:
        """Return the file that holds a tensor of ``names()``, for errors."""

    def delta(self, parts: Sequence[LinearPart]) -> Delta | None:
        """Return the addend of the layer of ``parts``; None, as plain weights have none."""
        return None

    def get(
        self,
        name: str,
        shape: Sequence[int] | None = None,
        shard: Shard = WHOLE,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return one tensor of floats, or a rank's part of it, on this engine's device.

        ``name`` is as in checkpoints. ``shape`` of the whole tensor is checked; dummies require it.
        ``dtype`` None is the engine's.

        The result may be a view of the mapped file; writes to it are private. Raises LoadError.
        """
        tensor = self._take(name, shape, shard, None)
        return tensor.to(device=self.device, dtype=dtype or self.dtype)

    def raw(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], shard: Shard = WHOLE
    ) -> Tensor:
        """Return one tensor of the codes of a form of weights, never cast.

        Otherwise as ``get``. Raises LoadError if it is not of ``dtype``.
        """
        return self._take(name, shape, shard, dtype).to(device=self.device)

    def _take(
        self, name: str, shape: Sequence[int] | None, shard: Shard, dtype: torch.dtype | None
    ) -> Tensor:
        wanted = None if shape is None else tuple(shape)
        spec = self.spec(name)
        if spec is not None:
            if wanted is not None and spec.shape != wanted:
                raise LoadError(
                    f"{name} has shape {spec.shape} in {self._where(name)}; "
                    f"the model needs {wanted}"
                )
            read = [each for each, torchs in TYPES.items() if torchs == dtype] or sorted(FLOATS)
            if spec.dtype not in read:
                raise LoadError(
                    f"{name} in {self._where(name)} is {spec.dtype}; read are {', '.join(read)}"
                )
        tensor = self._read(name, wanted, shard, dtype)
        self._used.add(name)
        self._progress.advance(tensor.nbytes)
        return tensor

    def unused(self, ignore: Collection[str] = ()) -> list[str]:
        """Return the unrequested tensors that match no shell pattern of ``ignore``."""
        return [
            name
            for name in self.names()
            if name not in self._used and not any(fnmatchcase(name, each) for each in ignore)
        ]

    def check_all_used(self, ignore: Collection[str] = ()) -> None:
        """End loading and log its time. Raises LoadError for unused tensors.

        ``ignore`` are patterns of tensors that the engine derives, such as
        ``*.rotary_emb.inv_freq``.
        """
        left = self.unused(ignore)
        if left:
            raise LoadError(_explain(left, self._where(left[0])))
        self.close()

    def close(self) -> None:
        """Close the files (tensors stay valid) and log what was loaded. May be called again."""
        self._progress.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _explain(left: list[str], where: str) -> str:
    shown = ", ".join(left[:SHOWN]) + (", ..." if len(left) > SHOWN else "")
    return f"the model does not know {len(left)} tensors of its files: {shown} (first in {where})"


def cut(tensor: Tensor, name: str, shard: Shard) -> Tensor:
    """Return a rank's part of a whole tensor, in the same memory."""
    if shard.count == 1:
        return tensor
    span = shard.span(name, tensor.shape[shard.dim])
    return tensor.narrow(shard.dim, span.start, span.stop - span.start)
