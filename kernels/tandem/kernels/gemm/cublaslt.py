"""Products of many rows by an algorithm of cuBLASLt that the device's table names.

cuBLAS's own choice is the fastest on a cool card. Prompts in a row reach the power limit, where
wide tiles win (bench/results/gemm_h200.md). torch cannot select an algorithm, so this calls the
library that torch has loaded; numbers are those of cublasLt.h. Sums are in float32.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.launch import raw_stream

from .table import Algorithm

logger = logging.getLogger(__name__)

ASKED_ROWS = (4096, 1024, 2048, 8192)
"""Numbers of rows for which the library names its algorithms; each takes any number of rows."""
MOST_ASKED = 64
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A = 3
_COLUMNS = 3
_WORKSPACE = 1
_TILE, _CLUSTER = 1, 8
_NO_WORKSPACE = c_size_t(0)


class CublasError(RuntimeError):
    """cuBLASLt refused a call."""


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a weight."""

    outputs: int
    inner: int
    dtype: torch.dtype


class Multiply:
    """x @ weight.T by one algorithm, for weights of one shape on one device."""

    def __init__(self, library: Library, shape: Shape, found: _Found) -> None:
        self._library = library
        self._found = found
        self._shape = shape
        self._operation = library.operation()
        # Its matrices are column by column, so the product is out.T = weight @ x.T.
        self._weight = library.layout(shape.dtype, shape.inner, shape.outputs)
        self._x = library.layout(shape.dtype, shape.inner, 1)
        self._out = library.layout(shape.dtype, shape.outputs, 1)
        self._one, self._zero = byref(c_float(1.0)), byref(c_float(0.0))
        self._rows = 1
        """Rows that the layouts are set to."""

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        return x.is_contiguous() and weight.is_contiguous()

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply [rows, in], [out, in] to [rows, out] on the current stream. Raises
        CublasError."""
        rows = x.shape[0]
        out = torch.empty(rows, self._shape.outputs, dtype=x.dtype, device=x.device)
        if rows != self._rows:
            self._library.set_columns(self._x, rows)
            self._library.set_columns(self._out, rows)
            self._rows = rows
        there = c_void_p(out.data_ptr())
        self._library.call(
            "cublasLtMatmul",
            self._operation,
            self._one,
            c_void_p(weight.data_ptr()),
            self._weight,
            c_void_p(x.data_ptr()),
            self._x,
            self._zero,
            there,
            self._out,
            there,
            self._out,
            self._found.algorithm,
            None,
            _NO_WORKSPACE,
            c_void_p(raw_stream(x.get_device())),
        )
        return out


class Library:
    """cuBLASLt as loaded by torch. Made once a device, with that device current."""

    def __init__(self) -> None:
        """Load the library. Raises OSError if there is none."""
        major = (torch.version.cuda or "").split(".")[0]
        self._lib = ctypes.CDLL(f"libcublasLt.so.{major}")
        self._handle = c_void_p()
        self._check("cublasLtCreate", self._lib.cublasLtCreate(byref(self._handle)))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that takes the handle first. Raises CublasError."""
        self._check(name, getattr(self._lib, name)(self._handle, *arguments))

    def operation(self) -> c_void_p:
        """Return the descriptor of a product with float32 sums and a transposed first matrix."""
        made, yes = c_void_p(), c_int(1)
        create = self._lib.cublasLtMatmulDescCreate
        self._check("operation", create(byref(made), _COMPUTE_FLOAT32, _FLOAT32))
        change = self._lib.cublasLtMatmulDescSetAttribute
        self._check("operation", change(made, _TRANSPOSE_A, byref(yes), c_size_t(sizeof(yes))))
        return made

    def layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        """Return the layout of a dense matrix, column by column."""
        made = c_void_p()
        create = self._lib.cublasLtMatrixLayoutCreate
        size = (c_uint64(rows), c_uint64(columns), c_int64(rows))
        self._check("layout", create(byref(made), _TYPES[dtype], *size))
        return made

    def set_columns(self, layout: c_void_p, columns: int) -> None:
        value = c_uint64(columns)
        change = self._lib.cublasLtMatrixLayoutSetAttribute
        self._check("layout", change(layout, _COLUMNS, byref(value), c_size_t(sizeof(value))))

    def all_products(self, shape: Shape) -> dict[Algorithm, Multiply]:
        """Return the products of every algorithm that the library offers for many rows."""
        found: dict[Algorithm, Multiply] = {}
        for rows in ASKED_ROWS:
            for algorithm, product in self.products(shape, rows):
                found.setdefault(algorithm, product)
        return found

    def products(self, shape: Shape, rows: int) -> Iterator[tuple[Algorithm, Multiply]]:
        """Yield the library's algorithms for ``rows`` rows without workspace, the best first."""
        preference, most, count = c_void_p(), c_uint64(0), c_int()
        create = self._lib.cublasLtMatmulPreferenceCreate
        self._check("preference", create(byref(preference)))
        change = self._lib.cublasLtMatmulPreferenceSetAttribute
        size = c_size_t(sizeof(most))
        self._check("preference", change(preference, _WORKSPACE, byref(most), size))
        found = (_Found * MOST_ASKED)()
        out = self.layout(shape.dtype, shape.outputs, rows)
        self.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.operation(),
            self.layout(shape.dtype, shape.inner, shape.outputs),
            self.layout(shape.dtype, shape.inner, rows),
            out,
            out,
            preference,
            MOST_ASKED,
            found,
            byref(count),
        )
        for each in found[: count.value]:
            if each.state == 0 and each.workspace == 0:
                tile, cluster = self._number(each, _TILE, 4), self._number(each, _CLUSTER, 2)
                yield Algorithm(tile, cluster), Multiply(self, shape, each)

    def _number(self, found: _Found, attribute: int, size: int) -> int:
        value, written = c_uint64(0), c_size_t()
        read = self._lib.cublasLtMatmulAlgoConfigGetAttribute
        status = read(found.algorithm, attribute, byref(value), c_size_t(size), byref(written))
        self._check("algorithm", status)
        return value.value

    @staticmethod
    def _check(name: str, status: int) -> None:
        if status:
            raise CublasError(f"{name} ended with status {status}")


def multiply(x: Tensor, weight: Tensor, algorithm: Algorithm) -> Tensor | None:
    """Return x [rows, in] @ weight [out, in].T, or None if the algorithm does not take them. Raises
    CublasError."""
    if x.dtype not in _TYPES or x.dtype != weight.dtype:
        return None
    found = _product(x.device, Shape(weight.shape[0], weight.shape[1], x.dtype), algorithm)
    return None if found is None or not found.takes(x, weight) else found(x, weight)


@cache
def _library(device: torch.device) -> Library | None:
    try:
        with torch.cuda.device(device):
            return Library()
    except (OSError, CublasError) as problem:
        logger.warning("products of many rows are as cuBLAS chooses: %s", problem)
        return None


@cache
def _product(device: torch.device, shape: Shape, algorithm: Algorithm) -> Multiply | None:
    library = _library(device)
    if library is None:
        return None
    found = library.all_products(shape).get(algorithm)
    if found is None:
        logger.warning("cuBLASLt has no %s for %s; it chooses itself", algorithm, shape)
    return found
