"""Parameters of one step's rows, gathered from columns that stay on the device.

Parameters change when a sequence comes, not when it draws, so one launch gathers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op
from tandem.kernels.sampling.types import Filters


class Columns(NamedTuple):
    """Parameters by row of the batch, each [rows of the batch]."""

    seeds: Tensor
    """int64."""
    top_k: Tensor
    """int64; 0 is off."""
    temperature: Tensor
    """float32."""
    min_p: Tensor
    """float32; 0 is off."""
    top_p: Tensor
    """float32; 1 is off."""


class Gathered(NamedTuple):
    """The parameters of one step."""

    keys: Tensor
    """int64 [draws], keys of ``Purpose.TOKEN``."""
    temperature: Tensor
    """float32 [rows]."""
    filters: Filters
    """Each [rows]."""


_HERE = "tandem.kernels.sampling.columns"
GATHER: Op[Callable[[Columns, Tensor, Tensor], Gathered]] = Op(
    "sampling.gather",
    {Backend.TORCH: f"{_HERE}.reference:gather", Backend.TRITON: f"{_HERE}.triton:gather"},
)


def gather(
    columns: Columns, rows: Tensor, draws: Tensor, *, backend: Backend | None = None
) -> Gathered:
    """Return the parameters of `rows` and keys of `draws`.

    rows are int64 [rows], batch rows of the logits. draws are dense int64 [3, draws]: row of the
    batch, choice and output position of each.
    """
    checks.shape("rows", rows, None)
    checks.shape("draws", draws, 3, None)
    for name, numbers in (("rows", rows), ("draws", draws)):
        checks.kind(name, numbers, torch.int64)
    return GATHER.on(rows.device, backend)(columns, rows, draws)
