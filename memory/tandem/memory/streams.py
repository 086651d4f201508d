"""GPU streams that their users return for reuse.

torch hands out 32 streams a device in a circle, so a new one may be in use elsewhere. Callable from
any thread.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_spare: dict[torch.device, list[Any]] = {}
"""No lock: the garbage collector may return a stream during ``borrow_stream``."""


def borrow_stream(owner: object, device: torch.device) -> Any:
    """Return a GPU stream that only ``owner`` has while it lives; earlier work on it may still
    run."""
    spare = _spare.setdefault(device, [])
    try:
        stream = spare.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    weakref.finalize(owner, spare.append, stream).atexit = False
    return stream
