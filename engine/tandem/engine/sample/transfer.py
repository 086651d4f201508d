"""Copies small host tensors to the logits' device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_COUNTED = 4096


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` from pinned memory, as other copies wait for the stream."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def index_on(numbers: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Return ``numbers`` as int64 on ``device``, in their shape."""
    if isinstance(numbers, np.ndarray):
        return on_device(torch.from_numpy(numbers), device)
    return on_device(torch.tensor(numbers, dtype=torch.int64), device)


def counting(count: int, device: torch.device) -> Tensor:
    """Return int64 0, 1, ... ``count`` - 1 on ``device``; not to be written to."""
    return _counted(max(_COUNTED, 1 << count.bit_length()), device)[:count]


@cache
def _counted(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)
