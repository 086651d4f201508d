"""Imports of a command without garbage collection: they create hundreds of thousands of objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Disable the garbage collector during imports, a sixth of a worker's import time. Afterwards
    freeze the imported objects, so that later collections skip them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
