"""Building many kernels side by side, before the first of them runs.

Triton builds a kernel when it is first launched, a second each, one after the other. Its passes and
ptxas let go of the interpreter's lock, so threads build as many at once as there are cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from tandem.kernels.launch.launcher import Launcher

MOST = 16
"""Threads; a start has some sixty kernels, and the slowest of them takes as long as four."""


@contextmanager
def building_ahead() -> Iterator[None]:
    """In the block a launch asks for its kernel and runs nothing; all are built when it ends.

    What the block computes is worthless, so it must not index by it. Kernels that are on disk are
    loaded from there. One thread of a process at a time. Raises what a build raises.
    """
    launch = JITFunction.run

    def ask(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(min(MOST, len(os.sched_getaffinity(0)))) as threads:
        JITFunction.run = ask
        try:
            with triton.AsyncCompileMode(threads), Launcher.asking_triton():
                yield
        finally:
            JITFunction.run = launch
