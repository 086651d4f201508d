"""Tables of the kernel for each shape, measured once a device.

tables/<device>.json has, per (kind, outputs, inner size, most rows), the fastest form, its time,
and the time without it; the form is null if that was faster. Shapes missing on a Hopper device use
rule.py; devices without a table use no form. For many rows it names algorithms of cuBLASLt, each
with its fewest rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from tandem.kernels.launch import generation, sm_count

from .form import ROW_CLASSES, Form, Kind, row_class
from .rule import form_of

HOPPER = 9
"""Generation of the rule's forms."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Algorithm of cuBLASLt, by the library's own numbers."""

    tile: int
    cluster: int


Key = tuple[Kind, int, int, int]
"""Kind, outputs, inner size, row class."""
Algorithms = dict[tuple[int, int], list[tuple[int, Algorithm | None]]]
"""Algorithms by (outputs, inner size), in ranges, most rows first: (fewest rows, algorithm)."""


def form_for(device: torch.device, kind: Kind, outputs: int, inner: int, rows: int) -> Form | None:
    """Return the form in the device's table, or the rule's; None for no form."""
    most = row_class(rows)
    if most is None or device.type != "cuda":
        return None
    return _chosen(device, kind, outputs, inner, most)


def algorithm_for(device: torch.device, outputs: int, inner: int, rows: int) -> Algorithm | None:
    """Return cuBLASLt's algorithm of the device's table; None leaves the choice to the library."""
    if rows <= ROW_CLASSES[-1] or device.type != "cuda":
        return None
    ranges = algorithms_on(device).get((outputs, inner), ())
    return next((each for fewest, each in ranges if rows >= fewest), None)


@cache
def algorithms_on(device: torch.device) -> Algorithms:
    """Return the algorithms of the device's table; see ``algorithms_of``."""
    return algorithms_of(_table(torch.cuda.get_device_name(device)))


@cache
def _chosen(device: torch.device, kind: Kind, outputs: int, inner: int, most: int) -> Form | None:
    known = choices_on(device)
    key = (kind, outputs, inner, most)
    if key in known or not known or generation(device) != HOPPER:
        return known.get(key)
    return form_of(kind, outputs, inner, most, sm_count(device))


@cache
def choices_on(device: torch.device) -> dict[Key, Form | None]:
    """Return the choices of the device's table; see ``choices_of``."""
    return choices_of(_table(torch.cuda.get_device_name(device)))


@cache
def _table(device_name: str) -> dict[str, Any]:
    name = device_name.lower().replace(" ", "-") + ".json"
    file = files("tandem.kernels.gemm") / "tables" / name
    found = file.read_text() if file.is_file() else '{"entries": [], "many_rows": []}'
    content: dict[str, Any] = json.loads(found)
    return content


def choices_of(table: dict[str, Any]) -> dict[Key, Form | None]:
    """Return the form of each measured product of a parsed table; None if no form is faster."""
    return {
        (Kind(entry["kind"]), *(entry[n] for n in ("outputs", "inner", "rows"))): (
            None if entry["form"] is None else Form(**entry["form"])
        )
        for entry in table["entries"]
    }


def forms_of(table: dict[str, Any]) -> dict[Key, Form]:
    """Return the forms of a parsed table, without products that are faster without one."""
    return {key: form for key, form in choices_of(table).items() if form is not None}


def algorithms_of(table: dict[str, Any]) -> Algorithms:
    """Return the choices for many rows of a parsed table."""
    ranges: Algorithms = {}
    for entry in sorted(table["many_rows"], key=lambda each: -int(each["rows"])):
        chosen = None if entry["algorithm"] is None else Algorithm(**entry["algorithm"])
        ranges.setdefault((entry["outputs"], entry["inner"]), []).append((entry["rows"], chosen))
    return ranges
