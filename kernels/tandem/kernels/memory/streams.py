"""Streams of a GPU for those who come again and again, and use them for a while.

torch has 32 streams a device, and who makes a new one is given the next of them, for ever round: an
engine that made its own at each wake-up had the transfer thread's in the end, and captured what
that one queued. So who is through leaves its stream to the next. Called by any thread.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_spare: dict[torch.device, list[Any]] = {}
"""Without a lock: what an owner had may come back while garbage is collected, in the midst of
``borrow_stream``."""


def borrow_stream(owner: object, device: torch.device) -> Any:
    """A stream of a GPU that no other owner has while this one lives; what was queued on it before
    may not be through."""
    spare = _spare.setdefault(device, [])
    try:
        stream = spare.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    weakref.finalize(owner, spare.append, stream).atexit = False
    return stream
