"""Registry of implementations: op × backend, chosen by name or by device.

An implementation ("module:function") is imported when it is chosen, so that a machine without
Triton never imports it. The typed wrappers call `Op.on`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.util import find_spec
from typing import Generic, TypeVar, cast

import torch

from .errors import NoBackend


class Backend(StrEnum):
    """Implementations of an op: plain torch (also the reference), Triton, Gluon, or LLVM."""

    TORCH = "torch"
    TRITON = "triton"
    GLUON = "gluon"
    LLVM = "llvm"


PREFERENCE: Mapping[str, tuple[Backend, ...]] = {
    "cuda": (Backend.GLUON, Backend.TRITON, Backend.TORCH),
    "cpu": (Backend.LLVM, Backend.TORCH) if find_spec("llvmlite") else (Backend.TORCH,),
}
"""Backends of each device type, in the order in which they are tried."""

F = TypeVar("F", bound=Callable[..., object])

_OPS: dict[str, Op[Callable[..., object]]] = {}


class Op(Generic[F]):
    """One op and its implementations, all with the signature `F`."""

    def __init__(
        self,
        name: str,
        implementations: Mapping[Backend, str],
        *,
        product: bool = False,
        writes: int | None = None,
    ) -> None:
        """``product`` ops are compared with plain torch when a model is loaded; ``writes`` is the
        parameter that they fill or add to, None if they return a result."""
        assert name not in _OPS, f"op {name} is defined twice"
        self.name = name
        self.product = product
        self.writes = writes
        self._where = dict(implementations)
        self._loaded: dict[Backend, F] = {}
        self._by_device: dict[str, F] = {}
        _OPS[name] = cast("Op[Callable[..., object]]", self)

    @property
    def backends(self) -> tuple[Backend, ...]:
        return tuple(self._where)

    def on(self, device: torch.device, backend: Backend | None = None) -> F:
        """Return the function for tensors on `device`: `backend`'s, or the device's first choice.
        Raises NoBackend."""
        if backend is not None:
            return self.load(backend)
        chosen = self._by_device.get(device.type)
        if chosen is None:
            chosen = self._by_device[device.type] = self.load(self._prefer(device.type))
        return chosen

    def use(self, device: torch.device, function: F) -> None:
        """Run ``function`` for tensors on devices of the type of ``device``."""
        self._by_device[device.type] = function

    def load(self, backend: Backend) -> F:
        """Return the function of one backend, imported at its first use."""
        if backend not in self._loaded:
            where = self._where.get(backend)
            if where is None:
                raise NoBackend(
                    f"op {self.name} has no backend {backend.value!r}; it has {_names(self._where)}"
                )
            module, _, function = where.partition(":")
            self._loaded[backend] = getattr(importlib.import_module(module), function)
        return self._loaded[backend]

    def _prefer(self, device_type: str) -> Backend:
        for backend in PREFERENCE.get(device_type, (Backend.TORCH,)):
            if backend in self._where:
                return backend
        raise NoBackend(f"op {self.name} runs on no {device_type}; it has {_names(self._where)}")


def ops() -> Mapping[str, Op[Callable[..., object]]]:
    """Return every op that has been imported, by name."""
    return dict(_OPS)


def _names(backends: Mapping[Backend, str]) -> str:
    return ", ".join(sorted(b.value for b in backends))
