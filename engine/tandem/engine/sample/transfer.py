"""Small host tensors onto the logits' device, without waiting for that device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """``values`` there. From pinned memory, as a copy from other memory waits for the stream."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def index_on(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [numbers] there."""
    return on_device(torch.tensor(numbers, dtype=torch.int64), device)
