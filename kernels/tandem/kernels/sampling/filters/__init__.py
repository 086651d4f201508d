"""Filters of unlikely tokens: the lowest logit that min-p, top-k and top-p keep."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op
from tandem.kernels.sampling.checking import check_logits, check_rows
from tandem.kernels.sampling.types import Filters

_HERE = "tandem.kernels.sampling.filters"
THRESHOLDS: Op[Callable[[Tensor, Filters, Tensor | None], Tensor]] = Op(
    "sampling.thresholds",
    {Backend.TORCH: f"{_HERE}.reference:thresholds", Backend.TRITON: f"{_HERE}.triton:thresholds"},
)


def thresholds(
    logits: Tensor,
    filters: Filters,
    *,
    temperature: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return the lowest logit / temperature that each row keeps under min-p, then top-k, then
    top-p.

    Tokens equal to the boundary are all kept. logits are float32, bfloat16 or float16 [rows,
    vocabulary]; temperature float32 [rows], above 0, None is 1. The result is float32 [rows], the
    value of a kept logit or min-p's bound; -inf keeps everything.
    """
    check_logits(logits)
    check_rows("temperature", temperature, logits)
    for name, values in zip(filters._fields, filters, strict=True):
        checks.shape(name, values, logits.shape[0])
    return THRESHOLDS.on(logits.device, backend)(logits, filters, temperature)
