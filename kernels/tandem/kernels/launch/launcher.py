"""Launches of a Triton kernel that find its build without Triton.

At every launch Triton looks anew which build of a kernel fits the arguments: 15 to 20 us of the
host's time, and a prompt's step launches a hundred and eighty kernels one by one. A launcher
remembers builds by the arguments themselves: numbers and constants by value, tensors by type, so
that what it remembers was built for arguments that Triton cannot tell apart. What it does not know,
and tensors that do not begin at 16 bytes where a kernel may count on it, goes through Triton.
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
"""Builds that a launcher remembers; then it begins anew."""
ALIGNED = 16
"""Bytes that Triton tells pointers and numbers apart by."""

Key = tuple[Hashable, ...]
_INT32_BITS = 31


class Launcher:
    """Of one kernel, whose constants are its last parameters: called as ``kernel[grid]`` would be,
    with the grid first. For one thread at a time, on the current stream."""

    _asking: ClassVar[bool] = False

    def __init__(self, kernel: Any) -> None:
        """``kernel``: what ``triton.jit`` or ``gluon.jit`` made."""
        self._kernel = kernel
        self._loose: tuple[bool, ...] = ()
        """Of each parameter, whether Triton looks at its type alone."""
        if isinstance(kernel, JITFunction):
            self._loose = tuple(
                each.do_not_specialize or each.do_not_specialize_on_alignment
                for each in kernel.params
            )
        self._builds: dict[Key, tuple[CompiledKernel, tuple[Any, ...]]] = {}
        """Compiled kernels by key, each with its constants in the order of the parameters."""

    def __call__(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """``args`` without a name, constants and options of the build by name."""
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
        """In the block every launch goes through Triton, which may not launch at all then."""
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
        """All that Triton may look at, the device first; None where it has to be asked."""
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
