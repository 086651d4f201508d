"""Streams of a GPU for users that come and go, with reuse.

torch has 32 streams a device, and a new one is the next of them in a circle: an engine that made
its own at each wake-up had the transfer thread's in the end, and captured that one's copies. So a
user returns its stream for the next one. Called by any thread.
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
