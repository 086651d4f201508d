"""Compilation of kernels, and their calls on the threads of torch's own OpenMP."""

from __future__ import annotations

import ctypes
import logging
import re
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from llvmlite import binding, ir
from torch import Tensor

from tandem.kernels.errors import NoBackend

from .build import EXTERNAL

logger = logging.getLogger(__name__)

WORK = 1 << 21
"""Products of numbers for which another thread is worth its start."""
TOLERANCE = 1e-4
"""Difference of a result from the reference, in largest results."""
_MAPS = Path("/proc/self/maps")
_OPENMP = re.compile(r"/.*/lib(?:gomp|iomp5|omp)\b[^/]*$", re.MULTILINE)
Address = Callable[[object], None]
"""A kernel, called with an array of its fields."""
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def call(kernel: Address, fields: object, work: int) -> None:
    """Run a kernel on as many threads as ``work``, in products of numbers, is worth. Raises
    NoBackend."""
    threads = min(_threads(), work // WORK)
    if threads > 1:
        _openmp().GOMP_parallel(kernel, fields, threads, 0)
    else:
        kernel(fields)


def bits_of(number: float) -> int:
    """Return the bits of ``number`` as a float32."""
    return int.from_bytes(struct.pack("<f", number), "little")


def agrees(name: str, pair: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Return whether the result of LLVM's kernels is that of the reference on this machine, and log
    a fault. ``pair`` computes both, on numbers of its own."""
    try:
        got, want = pair()
    except (NoBackend, RuntimeError) as error:
        logger.warning("%s: kernels cannot be compiled (%s); plain torch runs", name, error)
        return False
    worst = float((got - want).abs().max())
    if worst <= TOLERANCE * float(want.abs().max()):
        return True
    logger.warning("%s: LLVM differs from the reference by %.3g; plain torch runs", name, worst)
    return False


@cache
def _threads() -> int:
    """Return the size of torch's pool. It is read once: a step of few tokens lowers torch's own
    number."""
    return torch.get_num_threads()


@cache
def _openmp() -> ctypes.CDLL:
    """Return the OpenMP library that torch has loaded, as a second one would have other threads.
    Raises NoBackend."""
    found = _OPENMP.search(_MAPS.read_text()) if _MAPS.is_file() else None
    if found is None:
        raise NoBackend("LLVM's kernels have no threads: torch has loaded no OpenMP library")
    library = ctypes.CDLL(found[0])
    library.GOMP_parallel.argtypes = (*(_KERNEL, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint),)
    library.GOMP_parallel.restype = None
    return library


@cache
def _machine() -> binding.TargetMachine:
    """Return the target for this processor's own instructions."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    for name in EXTERNAL:
        address = ctypes.cast(getattr(_openmp(), name), ctypes.c_void_p).value
        binding.add_symbol(name, address)
    target = binding.Target.from_default_triple()
    features = binding.get_host_cpu_features().flatten()
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=3, jit=True
    )


_ENGINES: list[binding.ExecutionEngine] = []
"""Owners of the compiled code."""


def compiled(built: ir.Module) -> Mapping[str, Address]:
    """Return the kernels of a module by name."""
    machine = _machine()
    module = binding.parse_assembly(str(built))
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    _ENGINES.append(engine)
    engine.finalize_object()
    names = [each.name for each in built.functions if not each.is_declaration]
    return {name: _KERNEL(engine.get_function_address(name)) for name in names}
