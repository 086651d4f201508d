"""Copies on one GPU's engines, timed by the device, with a predicted end.

The first ranges of a batch are one call, so that the device copies while the rest is prepared.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.memory.device import (
    DeviceMemoryError,
    DeviceRange,
    call_driver,
    driver,
)

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
    """Copy between device addresses after the queued work of ``stream``, in any order. The arrays
    are int64 [copies]. Raises DeviceMemoryError, possibly after some copies have begun."""
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
    """Do the same as ``copy_many`` with one driver call for each copy."""
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


FIRST_BYTES = 40 << 20
MORE_BYTES = 288 << 20
"""Maximum bytes of ranges in each further call of the driver."""
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""


class Lane:
    """One stream, used by one thread that has the device's context."""

    def __init__(self, index: int) -> None:
        self._stream: Any = torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]
        self._spare: list[int] = []
        """Unused events."""
        self._open: deque[LaneMark] = deque()
        self._seen_at = 0.0
        self._begun: _Begun | None = None
        """Copies since the last mark."""

    def copy(self, targets: Numbers, sources: Numbers, sizes: Numbers, source: DeviceRange) -> None:
        """Copy ranges after the lane's earlier copies, in any order. int64 arrays [ranges]; sizes
        in bytes. Raises DeviceMemoryError; some copies may have begun then."""
        begun = self._begun
        if begun is None:
            begun = self._begun = _Begun(time.perf_counter(), source)
        ends, at, done = np.cumsum(sizes), 0, 0
        begun.nbytes += int(ends[-1])
        while at < len(sizes):
            most = MORE_BYTES if at else FIRST_BYTES
            stop = max(at + 1, int(np.searchsorted(ends, done + most, side="right")))
            some = slice(at, stop)
            copy_many(targets[some], sources[some], sizes[some], self._stream.cuda_stream)
            at, done = stop, int(ends[stop - 1])
            if begun.event is None:  # after the first, which must not wait for it
                begun.event, begun.untimed = self._recorded(), done

    def mark(self) -> LaneMark:
        """Return a mark after all copies so far. Raises DeviceMemoryError."""
        mark = LaneMark(self, self._begun or _Begun(time.perf_counter(), None), self._recorded())
        self._begun = None
        self._open.append(mark)
        return mark

    def wait(self) -> None:
        self._stream.synchronize()

    def due(self, mark: LaneMark) -> float:
        at = max(self._seen_at, self._open[0].begun.at) if self._open else math.inf
        for each in self._open:
            at += each.seconds
            if each is mark:
                return at
        return -math.inf

    def ended(self, mark: LaneMark, events: tuple[int | None, int]) -> None:
        self._seen_at = time.perf_counter()
        self._open.remove(mark)
        self._spare += [each for each in events if each is not None]

    def _recorded(self) -> int:
        event = self._spare.pop() if self._spare else _new_event()
        call_driver(
            "cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(self._stream.cuda_stream)
        )
        return event


@dataclass(slots=True)
class _Begun:
    """Copies between two marks."""

    at: float
    source: DeviceRange | None
    nbytes: int = 0
    event: int | None = None
    """Event after the first ranges."""
    untimed: int = 0
    """Bytes before that event."""


class LaneMark:
    """A mark in the order of a lane's copies."""

    def __init__(self, lane: Lane, begun: _Begun, end: int) -> None:
        self._lane, self.begun, self._end = lane, begun, end
        self._through = False
        source = begun.source
        self.seconds = 0.0 if source is None else source.rate.seconds_for(begun.nbytes)

    @property
    def due(self) -> float:
        """Return the predicted end, by ``time.perf_counter``; inf without a prediction."""
        return self._lane.due(self)

    def done(self) -> bool:
        if self._through:
            return True
        status = driver().cuEventQuery(ctypes.c_void_p(self._end))
        if status == _NOT_READY:
            return False
        if status:
            raise DeviceMemoryError(f"a copy failed: error {status} of the driver")
        self._through = True
        begun, timed = self.begun, self.begun.nbytes - self.begun.untimed
        if begun.event is not None and begun.source is not None and timed:
            begun.source.rate.took(timed, _seconds_between(begun.event, self._end))
        self._lane.ended(self, (begun.event, self._end))
        return True


def _new_event() -> int:
    event = ctypes.c_void_p()
    call_driver("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
    assert event.value is not None, "the driver made one"
    return event.value


def _seconds_between(begin: int, end: int) -> float:
    milliseconds = ctypes.c_float()
    call_driver(
        "cuEventElapsedTime",
        ctypes.byref(milliseconds),
        ctypes.c_void_p(begin),
        ctypes.c_void_p(end),
    )
    return max(milliseconds.value / 1e3, 1e-6)
