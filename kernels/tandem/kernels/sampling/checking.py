"""Checks of the logits that every sampling op takes."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels import checks

KINDS = (torch.float32, torch.bfloat16, torch.float16)


def check_logits(logits: Tensor) -> None:
    """Check logits: float [rows, vocabulary], rows dense but perhaps far apart."""
    checks.shape("logits", logits, None, None)
    checks.kind("logits", logits, *KINDS)
    checks.dense_last("logits", logits)


def check_rows(name: str, values: Tensor | None, logits: Tensor) -> None:
    """Check values: float32, one for each row of logits; or None."""
    if values is not None:
        checks.shape(name, values, logits.shape[0])
        checks.kind(name, values, torch.float32)
