"""Copies between GPUs' memories by the copy engines: many ranges by one call of the driver.

A call for each range would hold an interpreter that others need, too: under load each of them waits
for its turn there. The driver takes a whole list since CUDA 12.8; an older one gets them in turn.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from tandem.kernels.memory.device import call_driver, driver

Numbers = NDArray[np.int64]

_IN_STREAM_ORDER = 1
_BESIDE_COMPUTE = 1


class _Hint(ctypes.Structure):
    """CUmemLocation; 0 is none."""

    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Hint),
        ("target", _Hint),
        ("flags", ctypes.c_uint),
    )


def copy_many(targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
    """Copy between device addresses, behind what ``stream`` (not the default one) has, in any order
    among themselves: int64 arrays [copies] of addresses, addresses and bytes. Raises
    DeviceMemoryError; some copies may have begun then."""
    library = driver()
    if len(sizes) > 1 and hasattr(library, "cuMemcpyBatchAsync_v2"):
        _copy_batch("cuMemcpyBatchAsync_v2", (targets, sources, sizes), stream, ())
    elif len(sizes) > 1 and hasattr(library, "cuMemcpyBatchAsync"):
        failed = ctypes.c_size_t()
        more = (ctypes.byref(failed),)
        _copy_batch("cuMemcpyBatchAsync", (targets, sources, sizes), stream, more)
    else:
        copy_in_turn(targets, sources, sizes, stream)


def copy_in_turn(targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
    """Copy as ``copy_many``, by a call each."""
    rows = (each.tolist() for each in (targets, sources, sizes))
    for target, source, nbytes in zip(*rows, strict=True):
        call_driver(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_ulonglong(target),
            ctypes.c_ulonglong(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )


def _copy_batch(
    name: str, arrays: tuple[Numbers, Numbers, Numbers], stream: int, more: tuple[object, ...]
) -> None:
    dense = [np.ascontiguousarray(each, dtype=np.int64) for each in arrays]
    attributes = _Attributes(_IN_STREAM_ORDER, _Hint(), _Hint(), _BESIDE_COMPUTE)
    first = ctypes.c_size_t(0)
    call_driver(
        name,
        *(ctypes.c_void_p(each.ctypes.data) for each in dense),
        ctypes.c_size_t(len(dense[0])),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        *more,
        ctypes.c_void_p(stream),
    )
