"""Which kernel multiplies which shape: measured once a device, kept as data beside the code.

A table is tables/<device>.json: the command that made it, the versions it was made with, and per
(kind, outputs, inner size, most rows) the fastest form, its time, and the time without it: that of
cuBLAS for a product alone, that of the ops one after the other for a product with its neighbours.
Where that was faster the form is null, as it is for whatever is not in the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

import torch

ROW_CLASSES = (1, 16, 32, 64, 128)
"""Most rows of each class of sizes that the tables know."""


class Kind(StrEnum):
    """What is folded into a product."""

    PLAIN = "plain"
    """Bias or residual, if any."""
    GATED = "gated"
    """The gated activation after it, from two rows on."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a kernel is built for a shape."""

    outputs: int
    """Of a program."""
    inner: int
    """Taken at a time."""
    split: int = 1
    """Programs that share the inner dimension."""
    stages: int = 3
    warps: int = 4
    stream: bool = False
    """Whether it is the kernel for Hopper (gluon.py); `warps` then says nothing."""
    group: int = 1
    """Tiles of `outputs` that a program of that kernel multiplies with the same rows of x."""


Key = tuple[Kind, int, int, int]
"""Kind, outputs, inner size, row class."""


def row_class(rows: int) -> int | None:
    """The smallest class that holds `rows`; None beyond the last."""
    return next((most for most in ROW_CLASSES if rows <= most), None)


def form_for(device: torch.device, kind: Kind, outputs: int, inner: int, rows: int) -> Form | None:
    """The form that the device's table has; None is to do without."""
    most = row_class(rows)
    if most is None or device.type != "cuda":
        return None
    return _table(torch.cuda.get_device_name(device)).get((kind, outputs, inner, most))


@cache
def _table(device_name: str) -> dict[Key, Form]:
    name = device_name.lower().replace(" ", "-") + ".json"
    file = files("tandem.kernels.gemm") / "tables" / name
    return forms_of(json.loads(file.read_text())) if file.is_file() else {}


def forms_of(table: dict[str, Any]) -> dict[Key, Form]:
    """The forms of a parsed table, without what is faster without one."""
    return {
        (Kind(entry["kind"]), *(entry[n] for n in ("outputs", "inner", "rows"))): Form(
            **entry["form"]
        )
        for entry in table["entries"]
        if entry["form"] is not None
    }
