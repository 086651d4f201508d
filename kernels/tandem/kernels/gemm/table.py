"""Which kernel multiplies which shape: measured once a device, kept as data beside the code.

A table is tables/<device>.json: the command that made it, the versions it was made with, and per
(outputs, inner size, most rows) the fastest form with its time and cuBLAS's. Where cuBLAS was
faster the form is null, as it is for any shape that is not in the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

ROW_CLASSES = (1, 16, 32, 64)
"""Most rows of each class of sizes that the tables know."""


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


Key = tuple[int, int, int]
"""Outputs, inner size, row class."""


def row_class(rows: int) -> int | None:
    """The smallest class that holds `rows`; None beyond the last."""
    return next((most for most in ROW_CLASSES if rows <= most), None)


def form_for(device: torch.device, outputs: int, inner: int, rows: int) -> Form | None:
    """The form that the device's table has for a product; None is cuBLAS."""
    most = row_class(rows)
    if most is None or device.type != "cuda":
        return None
    return _table(torch.cuda.get_device_name(device)).get((outputs, inner, most))


@cache
def _table(device_name: str) -> dict[Key, Form]:
    name = device_name.lower().replace(" ", "-") + ".json"
    file = files("tandem.kernels.gemm") / "tables" / name
    return forms_of(json.loads(file.read_text())) if file.is_file() else {}


def forms_of(table: dict[str, Any]) -> dict[Key, Form]:
    """The forms of a parsed table, without the shapes that cuBLAS keeps."""
    return {
        (entry["outputs"], entry["inner"], entry["rows"]): Form(**entry["form"])
        for entry in table["entries"]
        if entry["form"] is not None
    }
