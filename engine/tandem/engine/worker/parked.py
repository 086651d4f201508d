"""A model's weights in host memory while their rank sleeps.

The model is unchanged, but its tensors have no memory: storages are emptied and filled again, so
that shared storages and views stay valid. They return at other addresses: graphs of steps are
captured again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import accumulate
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType

import torch
from torch import Tensor

from tandem.kernels.memory.page_locked import HostMemory, Registrar

_APART = 256
"""Alignment of each tensor in bytes, as on a GPU."""
_OUTSIDE = (ModuleType, type, BuiltinFunctionType)
"""Types that refer beyond a model, to all imported code."""


class ParkingRoom:
    """Host memory for a model's weights, page-locked if they come from a GPU. It is kept while the
    rank is awake: locking takes far longer than copying."""

    def __init__(self, registrar: Registrar | None) -> None:
        self._registrar = registrar
        self._memory: HostMemory | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` flat uint8 bytes; their content is lost. Raises HostMemoryError."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self.free()
            self._memory = HostMemory(nbytes, self._registrar)
        return self._memory.tensor

    def free(self) -> None:
        """Free the memory. May be called twice."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None


class ParkedWeights:
    """Parked tensors of a model on one device."""

    def __init__(self, model: object, device: torch.device, room: ParkingRoom) -> None:
        """Copy all into ``room``, then empty them. Raises HostMemoryError without enough host
        memory; then nothing has been emptied."""
        storages = list(storages_of(model, device))
        sizes = [each.nbytes() for each in storages]
        places = list(accumulate((-(-each // _APART) * _APART for each in sizes), initial=0))
        memory = room.take(places[-1])
        self._parked = [
            (storage, memory[at : at + size])
            for storage, at, size in zip(storages, places, sizes, strict=False)
        ]
        self.nbytes = sum(sizes)
        for storage, copy in self._parked:
            copy.copy_(_bytes(storage))
        for storage in storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Fill the tensors again. Raises RuntimeError without enough device memory; then none is
        filled, and it may be called again."""
        try:
            for storage, copy in self._parked:
                storage.resize_(len(copy))
                _bytes(storage).copy_(copy)
        except RuntimeError:
            for storage, _ in self._parked:
                storage.resize_(0)
            raise


def storages_of(model: object, device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Yield each storage on ``device`` that is reached from ``model``, once."""
    seen: set[int] = set()
    for tensor in _tensors(model):
        if lies_on(device, tensor.device) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def weight_bytes(model: object, device: torch.device) -> int:
    """Return the bytes of a model's weights on ``device``, packed ones included."""
    packed = (each for each in _tensors(model) if each.layout is not torch.strided)
    own = sum(each.numel() * each.element_size() for each in packed if lies_on(device, each.device))
    return own + sum(each.nbytes() for each in storages_of(model, device))


def lies_on(device: torch.device, there: torch.device) -> bool:
    """Return whether a tensor whose device is ``there`` is on ``device``. A tensor names its GPU; a
    setting ("cuda") may not, and is the current one, which has a rank's tensors."""
    return there.type == device.type and device.index in (None, there.index)


def _tensors(model: object) -> Iterator[Tensor]:
    """Yield each tensor that is reached from ``model``, once."""
    seen: set[int] = set()
    left = [model]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _OUTSIDE):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, FunctionType):  # its globals lead out, what it closes over does not
            left.extend(each.__closure__ or ())
        elif isinstance(each, CellType):
            left.append(each.cell_contents)
        else:
            left.extend(gc.get_referents(each))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return all of a storage as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
