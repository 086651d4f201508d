"""Launches of a Triton kernel that find its build without Triton, whose search is slow.

A launcher caches builds by the arguments: numbers and constants by value, tensors by type. Unknown
arguments go through Triton, as do tensors that are not aligned to 16 bytes if a kernel may depend
on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from . import raw_stream

MOST = 1024
"""Maximum builds that a launcher caches; beyond it the cache is emptied."""
ALIGNED = 16
"""Alignment in bytes by which Triton distinguishes pointers and numbers."""

Key = tuple[Hashable, ...]
_INT32_BITS = 31


class Launcher:
    """Launcher of one kernel whose constants are its last parameters, called as ``kernel[grid]``
    with the grid first. For one thread at a time, on the current stream."""

    _asking: ClassVar[bool] = False

    def __init__(self, kernel: Any) -> None:
        """``kernel`` is the result of ``triton.jit`` or ``gluon.jit``."""
        self._kernel = kernel
        self._loose: tuple[bool, ...] = ()
        """Whether Triton checks only the type, for each parameter."""
        if isinstance(kernel, JITFunction):
            self._loose = tuple(
                each.do_not_specialize or each.do_not_specialize_on_alignment
                for each in kernel.params
            )
        self._builds: dict[Key, tuple[CompiledKernel, tuple[Any, ...]]] = {}
        """Compiled kernels by key, each with its constants in the order of the parameters."""

    def __call__(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """Launch the kernel: ``args`` without a name, constants and build options by name."""
        key = None if Launcher._asking else self._key(args, named)
        known = None if key is None else self._builds.get(key)
        if known is None:
            self._ask(key, grid, args, named)
            return
        build, constants = known
        device: Any = key[0]  # type: ignore[index]
        build[(*grid, 1, 1)](*args, *constants, stream=raw_stream(device))

    @classmethod
    @contextmanager
    def asking_triton(cls) -> Iterator[None]:
        """Send every launch in the block through Triton, which may then not launch at all."""
        cls._asking = True
        try:
            yield
        finally:
            cls._asking = False

    def _ask(
        self, key: Key | None, grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        found = self._kernel[grid](*args, **named)
        if key is None or not isinstance(found, CompiledKernel):
            return
        if len(self._builds) == MOST:
            self._builds.clear()
        names = self._kernel.arg_names[len(args) :]
        self._builds[key] = found, tuple(named[name] for name in names)

    def _key(self, args: tuple[Any, ...], named: dict[str, Any]) -> Key | None:
        """Return all that Triton may check, the device first; None if Triton must be called."""
        device = -1
        parts: list[Hashable] = []
        for each, loose in zip(args, self._loose, strict=False):
            if isinstance(each, Tensor):
                if not loose and each.data_ptr() % ALIGNED:
                    return None
                if device < 0:
                    device = each.get_device()
                parts.append(each.dtype)
            elif isinstance(each, float):
                parts.append(each)
            elif isinstance(each, int):
                parts.append(each.bit_length() > _INT32_BITS if loose else each)
            else:  # a tensor descriptor, whose base Triton requires to be aligned
                parts += (each.base.dtype, tuple(each.block_shape), each.layout)
        return None if device < 0 else (device, *parts, *named.values())
