"""GPU memory made by ``cuMemCreate``: other processes map it by a file descriptor.

Handles of torch's allocator (``cudaMalloc``) cannot pass between containers. The memory is freed
with its tensor.
"""

from __future__ import annotations

import ctypes
import math
import os
import stat
import weakref
from functools import cache

import torch
from torch import Tensor

from tandem.protocol.errors import TandemError

MOST_TIMES = 4
"""Factor over the largest timed copy up to which a time is predicted."""
LARGE_BYTES = 128 << 20
"""Size from which a copy counts for the link's rate, however large others were."""
_FADE = 16
"""Divisor of the difference by which a slower copy lowers the rate."""


class Rate:
    """Best rate in bytes per second, fading: predictions are rather too early than too late."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._largest = 0

    def took(self, nbytes: int, seconds: float) -> None:
        if nbytes < min(self._largest // MOST_TIMES, LARGE_BYTES):
            return
        self._largest = max(self._largest, nbytes)
        seen = nbytes / seconds
        self._rate = seen if seen > self._rate else self._rate + (seen - self._rate) / _FADE

    def seconds_for(self, nbytes: int) -> float:
        """Return the predicted seconds of a copy; inf without a prediction."""
        if not self._rate or nbytes > MOST_TIMES * self._largest:
            return math.inf
        return nbytes / self._rate


_PINNED = 1
_DEVICE = 1
_POSIX_DESCRIPTOR = 1
_READ_ONLY = 1
_READ_WRITE = 3
_MINIMUM = 0
_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
_RDMA_ATTRIBUTE = 110
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED."""


class DeviceMemoryError(TandemError):
    """The driver refused; the text names its function and its error."""


class DeviceFullError(DeviceMemoryError):
    """The device has not enough free memory."""


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("rights", ctypes.c_int))


class _Mapping:
    """One mapped range, in numpy's and torch's array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class MappedAllocator:
    """``KVCacheAllocator`` of one device; ``descriptor_of`` finds its memory."""

    def __init__(self, device: torch.device) -> None:
        """Raise DeviceMemoryError if driver or device lack the functions."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._ranges: dict[int, DeviceRange] = {}
        """Allocated ranges that are still in use, by address."""
        driver()

    def __call__(self, size: int) -> Tensor:
        """Return flat uint8 memory of at least ``size`` bytes. Raises DeviceMemoryError."""
        use_device(self._index)  # does not wait: a stream of the device may be captured now
        whole = _whole_grains(size, _properties_of(self._index))
        address = ctypes.c_ulonglong()
        length, zero = ctypes.c_size_t(whole), ctypes.c_ulonglong(0)
        call_driver(
            "cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), zero, zero
        )
        given = DeviceRange(address.value, whole, 0)
        try:
            self._fill(given)
        except DeviceMemoryError:
            given.close()
            raise
        mapping = _Mapping(given.address, whole)
        self._ranges[given.address] = given
        weakref.finalize(mapping, self._forget, given.address)
        return torch.as_tensor(mapping, device=self._device)

    def give_back(self, tensor: Tensor) -> int:
        """Return a tensor's memory to the device; return its bytes. Keep the address; it must not
        be accessed before ``take_again``. Raises DeviceMemoryError if the memory is not of this
        allocator."""
        given = self._range_of(tensor)
        torch.cuda.synchronize(self._device)
        given.empty()
        return given.size

    def take_again(self, tensor: Tensor) -> None:
        """Map memory of any content at a tensor's address again, unless it has memory. Raises
        DeviceMemoryError."""
        given = self._range_of(tensor)
        if given.handle:
            return
        torch.cuda.synchronize(self._device)
        self._fill(given)

    def _range_of(self, tensor: Tensor) -> DeviceRange:
        given = self._ranges.get(tensor.data_ptr())
        if given is None:
            raise DeviceMemoryError("the tensor does not begin memory of this allocator")
        return given

    def _forget(self, address: int) -> None:
        self._ranges.pop(address).close()

    def _fill(self, given: DeviceRange) -> None:
        handle, properties = ctypes.c_ulonglong(), _properties_of(self._index)
        address, length = ctypes.c_ulonglong(given.address), ctypes.c_size_t(given.size)
        zero = ctypes.c_ulonglong(0)
        call_driver("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(properties), zero)
        given.handle = handle.value
        try:
            call_driver("cuMemMap", address, length, ctypes.c_size_t(0), handle, zero)
            access = _Access(_Location(_DEVICE, self._index), _READ_WRITE)
            call_driver("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
        except DeviceMemoryError:
            given.empty()
            raise


class DeviceRange:
    """Device addresses and the memory mapped there, of this process or of another."""

    def __init__(self, address: int, size: int, handle: int) -> None:
        """``handle`` is the memory's; 0 without memory."""
        self.address = address
        self.size = size
        self.handle = handle
        self.rate = Rate()

    def empty(self) -> None:
        """Unmap and release the memory; keep the addresses."""
        if self.handle:
            library = driver()
            library.cuMemUnmap(ctypes.c_ulonglong(self.address), ctypes.c_size_t(self.size))
            library.cuMemRelease(ctypes.c_ulonglong(self.handle))
            self.handle = 0

    def close(self) -> None:
        """Unmap; no copy may be under way. May be called twice."""
        self.empty()
        if self.address:
            driver().cuMemAddressFree(ctypes.c_ulonglong(self.address), ctypes.c_size_t(self.size))
            self.address = 0


def descriptor_of(tensor: Tensor) -> tuple[int, int]:
    """Return a POSIX file descriptor of the tensor's range, which the caller closes, and its bytes.
    Raises DeviceMemoryError unless a ``MappedAllocator`` made it."""
    handle, descriptor = ctypes.c_ulonglong(), ctypes.c_int()
    base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
    address = ctypes.c_ulonglong(tensor.data_ptr())
    call_driver(
        "cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(tensor.data_ptr())
    )
    try:
        call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        if base.value != address.value:
            raise DeviceMemoryError("the tensor does not begin its range of memory")
        call_driver(
            "cuMemExportToShareableHandle",
            ctypes.byref(descriptor),
            handle,
            ctypes.c_int(_POSIX_DESCRIPTOR),
            ctypes.c_ulonglong(0),
        )
    finally:
        driver().cuMemRelease(handle)
    return descriptor.value, size.value


_OTHERS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFBLK, stat.S_IFLNK)
"""Kinds of files that cannot be exported memory."""


def check_descriptor(descriptor: int) -> None:
    """Raise DeviceMemoryError for a file, folder, pipe or socket. The driver checks device and
    size."""
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind in _OTHERS:
        raise DeviceMemoryError(f"a descriptor is not of a GPU's memory: its kind is {kind:#o}")


def map_range(descriptor: int, size: int, device: int, *, writable: bool = False) -> DeviceRange:
    """Map the first ``size`` bytes of another process's range on a device of this process. The
    caller keeps the descriptor. Raises DeviceMemoryError, also if the GPU cannot be reached."""
    check_descriptor(descriptor)
    handle, address = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    whole = _whole_grains(size, _properties_of(device))
    length, zero = ctypes.c_size_t(whole), ctypes.c_ulonglong(0)
    call_driver(
        "cuMemImportFromShareableHandle",
        ctypes.byref(handle),
        ctypes.c_void_p(descriptor),
        ctypes.c_int(_POSIX_DESCRIPTOR),
    )
    try:
        call_driver(
            "cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), zero, zero
        )
        call_driver("cuMemMap", address, length, ctypes.c_size_t(0), handle, zero)
        rights = _READ_WRITE if writable else _READ_ONLY
        access = _Access(_Location(_DEVICE, device), rights)
        call_driver("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
    except DeviceMemoryError:
        _free(address.value, whole, handle.value)
        raise
    return DeviceRange(address.value, whole, handle.value)


def _properties_of(device: int) -> _Properties:
    network = ctypes.c_int()
    call_driver(
        "cuDeviceGetAttribute",
        ctypes.byref(network),
        ctypes.c_int(_RDMA_ATTRIBUTE),
        ctypes.c_int(device),
    )
    flags = _Flags(rdma=1 if network.value else 0)
    where = _Location(_DEVICE, device)
    return _Properties(_PINNED, _POSIX_DESCRIPTOR, where, None, flags)


def _whole_grains(size: int, properties: _Properties) -> int:
    """Return ``size`` rounded up to what can be mapped."""
    grain = ctypes.c_size_t()
    call_driver(
        "cuMemGetAllocationGranularity",
        ctypes.byref(grain),
        ctypes.byref(properties),
        ctypes.c_int(_MINIMUM),
    )
    return -(-size // grain.value) * grain.value


def use_device(device: int) -> None:
    """Make a device's context current in this thread, without waiting."""
    context = ctypes.c_void_p()
    call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
    call_driver("cuCtxSetCurrent", context)


def _free(address: int, size: int, handle: int) -> None:
    library = driver()
    if address:
        library.cuMemUnmap(ctypes.c_ulonglong(address), ctypes.c_size_t(size))
        library.cuMemAddressFree(ctypes.c_ulonglong(address), ctypes.c_size_t(size))
    library.cuMemRelease(ctypes.c_ulonglong(handle))


@cache
def driver() -> ctypes.CDLL:
    """Return the CUDA driver's library. Raises DeviceMemoryError if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceMemoryError(f"the CUDA driver's library cannot be loaded: {error}") from error


def call_driver(name: str, *arguments: object) -> None:
    """Call a function of the driver. Raises DeviceMemoryError unless it succeeds."""
    library = driver()
    function = getattr(library, name, None)
    if function is None:
        raise DeviceMemoryError(f"the CUDA driver has no {name}")
    status = function(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        shown = text.value.decode() if text.value else str(status)
        kind = DeviceFullError if status == _OUT_OF_MEMORY else DeviceMemoryError
        raise kind(f"{name} failed: {shown}")
