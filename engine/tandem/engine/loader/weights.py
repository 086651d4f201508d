"""What a model loads from, whatever the source: ask for tensors by name, then check the rest.

Sources (safetensors files, dummies) fill in where tensors come from; casting, the device, the
account of what was used and the progress line are here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from tandem.engine.loader.errors import UnexpectedTensors
from tandem.engine.loader.progress import Progress

SHOWN = 5
"""Names that an error lists before it only counts."""


class Weights(ABC):
    """Tensors by name. Use as a context manager, or end with ``check_all_used`` or ``close``."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, progress: Progress) -> None:
        self.dtype = dtype
        self.device = device
        self._progress = progress
        self._used: set[str] = set()

    @abstractmethod
    def names(self) -> Collection[str]:
        """Every tensor there is, sorted; of dummies, those already asked for."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Whether ``get(name)`` would find a tensor; a dummy has every name."""

    @abstractmethod
    def _read(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        """The tensor as its source holds it, its shape checked."""

    @abstractmethod
    def _where(self, name: str) -> str:
        """The file that holds a tensor of ``names()``, for errors."""

    def get(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """One tensor in this engine's dtype and on its device.

        Args:
            name: as checkpoints have it, ``model.layers.0.self_attn.q_proj.weight``.
            shape: checked where given. Dummies need it.

        Where dtype and device are already right the tensor is a view of the mapped file: nothing
        is copied, pages come in as they are touched, writing to it stays private to the process.
        Raises MissingTensor, WrongShape or UnsupportedTensor.
        """
        tensor = self._read(name, None if shape is None else tuple(shape))
        self._used.add(name)
        self._progress.advance(tensor.nbytes)
        return tensor.to(device=self.device, dtype=self.dtype)

    def unused(self, ignore: Collection[str] = ()) -> list[str]:
        """Tensors that nobody asked for and no pattern of ``ignore`` (as of a shell) covers."""
        return [
            name
            for name in self.names()
            if name not in self._used and not any(fnmatchcase(name, each) for each in ignore)
        ]

    def check_all_used(self, ignore: Collection[str] = ()) -> None:
        """End of loading: says how long it took, and raises UnexpectedTensors for what is left.

        ``ignore`` are patterns of tensors that this engine derives itself, such as
        ``*.rotary_emb.inv_freq``.
        """
        left = self.unused(ignore)
        if left:
            raise UnexpectedTensors(_explain(left, self._where(left[0])))
        self.close()

    def close(self) -> None:
        """Let go of the files (tensors stay valid) and log what was loaded. May be repeated."""
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
