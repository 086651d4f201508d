"""Parallel builds of many kernels, before the first of them runs.

Triton builds a kernel at its first launch, one after the other. Its passes and ptxas release the
interpreter's lock, so threads build in parallel.
"""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from tandem.kernels.launch.launcher import Launcher

MOST = 16
"""Maximum threads."""


@contextmanager
def building_ahead() -> Iterator[None]:
    """Build in the block all kernels that it launches, without running them.

    All are built when the block ends. Its values are invalid, so it must not index by them. One
    thread of a process at a time. Raises the errors of a build.
    """
    launch, parse = JITFunction.run, JITFunction.parse
    one_at_a_time = threading.Lock()

    def ask(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    def parse_alone(self: JITFunction[Any]) -> ast.Module:
        # Before 3.11.8 and 3.12.2 ast.parse in threads may raise a SystemError (cpython issue
        # 106905).
        with one_at_a_time:
            tree: ast.Module = parse(self)
        return tree

    with ThreadPoolExecutor(min(MOST, len(os.sched_getaffinity(0)))) as threads:
        JITFunction.run, JITFunction.parse = ask, parse_alone
        try:
            with triton.AsyncCompileMode(threads), Launcher.asking_triton():
                yield
        finally:
            JITFunction.run, JITFunction.parse = launch, parse
