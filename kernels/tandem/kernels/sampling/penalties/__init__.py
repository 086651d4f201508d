"""Penalties of tokens that a row has seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op
from tandem.kernels.sampling.types import Penalties

_HERE = "tandem.kernels.sampling.penalties"
PENALIZE: Op[Callable[[Tensor, Penalties], None]] = Op(
    "sampling.penalize",
    {Backend.TORCH: f"{_HERE}.reference:penalize", Backend.TRITON: f"{_HERE}.triton:penalize"},
)


def penalize(logits: Tensor, penalties: Penalties, *, backend: Backend | None = None) -> None:
    """Apply repetition, frequency and presence penalties in place on float32 [rows, vocabulary]."""
    checks.shape("logits", logits, None, None)
    checks.kind("logits", logits, torch.float32)
    checks.dense_last("logits", logits)
    PENALIZE.on(logits.device, backend)(logits, penalties)
