"""Compiles kernels in a process of its own, for tests that need no more than what came out.

At the end of a process that compiled, the library's bindings list everything that Python did not
take down before them: hundreds of lines after pytest's summary. The process here ends without that.
"""

from __future__ import annotations

import atexit
import importlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

COMPILE_SECONDS = 300.0


@contextmanager
def compiler() -> Iterator[ProcessPoolExecutor]:
    """One process that compiles; nothing is found on disk, fused multiply-adds as in a worker."""
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(1, get_context("spawn"), _begin, (cache,)) as pool,
    ):
        yield pool


def _begin(cache: str) -> None:
    atexit.register(os._exit, 0)  # first in, so last out: nothing of Python's own is left undone
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"


def shared_bytes(
    kernel: str, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> int:
    """Shared memory of ``module:name`` built for Hopper; runs in the compiler's process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, name = kernel.partition(":")
    function = getattr(importlib.import_module(module), name)
    names = function.arg_names
    source = GluonASTSource(
        function,
        {each: types.get(each, "constexpr") for each in names},
        {(names.index(each),): value for each, value in constants.items()},
    )
    target = GPUTarget("cuda", 90, 32)
    found = triton.compile(source, target=target, options={"num_warps": 4, **options})
    assert found.asm["cubin"]
    return int(found.metadata.shared)
