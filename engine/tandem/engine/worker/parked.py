"""A model's weights in host memory while their rank sleeps.

The model stays as it is, its tensors without memory: storages are emptied, and filled again, so
that whatever shares them, or is a view of them, is found as it was. They come back at other
addresses: graphs of steps are captured anew.
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
"""Bytes of which each tensor begins at a multiple, as a GPU's do."""
_OUTSIDE = (ModuleType, type, BuiltinFunctionType)
"""What leads out of a model: to all that was ever imported."""


class ParkingRoom:
    """Host memory for a model's weights, page-locked where they come from a GPU. It is kept while
    the rank is awake: to lock it takes far longer than to copy."""

    def __init__(self, registrar: Registrar | None) -> None:
        self._registrar = registrar
        self._memory: HostMemory | None = None

    @property
    def nbytes(self) -> int:
        """That are held."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, nbytes: int) -> Tensor:
        """So many, flat uint8; what was in them is lost. Raises HostMemoryError."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self.free()
            self._memory = HostMemory(nbytes, self._registrar)
        return self._memory.tensor

    def free(self) -> None:
        """Give it back. May be called twice."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None


class ParkedWeights:
    """The tensors of a model that lie on one device."""

    def __init__(self, model: object, device: torch.device, room: ParkingRoom) -> None:
        """Copies all into ``room``, then empties them. Raises HostMemoryError where host memory is
        short; then nothing has been emptied."""
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
        """Fill them again. Raises RuntimeError where the device's memory is short; then none is
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
    """Each storage on ``device`` that is reached from ``model``, once."""
    seen: set[int] = set()
    for tensor in _tensors(model):
        if lies_on(device, tensor.device) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def weight_bytes(model: object, device: torch.device) -> int:
    """Bytes of a model's weights on ``device``, those that a library packed for itself too."""
    packed = (each for each in _tensors(model) if each.layout is not torch.strided)
    own = sum(each.numel() * each.element_size() for each in packed if lies_on(device, each.device))
    return own + sum(each.nbytes() for each in storages_of(model, device))


def lies_on(device: torch.device, there: torch.device) -> bool:
    """Whether a tensor whose device is ``there`` is on ``device``. A tensor says which GPU it is
    on; a setting ("cuda") need not, and means the current one, on which a rank's tensors are."""
    return there.type == device.type and device.index in (None, there.index)


def _tensors(model: object) -> Iterator[Tensor]:
    """Each tensor that is reached from ``model``, once."""
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
    """All of a storage as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
