"""File and offset of each tensor of a prepared folder, from the headers of safetensors.

The safetensors library does not report offsets, which ``Uploader`` needs.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tandem.engine.config.weight_files import INDEX, indexed, unindexed
from tandem.engine.loader.errors import LoadError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LOG = logging.getLogger(__name__)


class Progress:
    """Count of loaded bytes; shows a bar from the first ``advance`` to ``finish``."""

    def __init__(self, *, source: str, total: int | None, bar: bool = True) -> None:
        """``total`` is in bytes, None if unknown; ``bar`` False never shows one."""
        self._source = source
        self._total = total
        self._wanted = bar
        self._bar: tuple[Bar, TaskID] | None = None
        self._started = time.monotonic()
        self._done = False
        self.loaded = 0
        """Bytes so far, as the files hold them."""

    def advance(self, count: int) -> None:
        if self._wanted and self._bar is None:
            self._wanted = False
            self._bar = _bar(self._source, self._total)
        self.loaded += count
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self.loaded)

    def finish(self) -> None:
        if self._done:
            return
        self._done = True
        if self._bar is not None:
            self._bar[0].stop()
        seconds = time.monotonic() - self._started
        LOG.info("loaded %.3f GB from %s in %.2f s", self.loaded / 1e9, self._source, seconds)


def _bar(source: str, total: int | None) -> tuple[Bar, TaskID] | None:
    if not sys.stderr.isatty():
        return None
    with suppress(ImportError):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        bar = Bar(*columns, TransferSpeedColumn(), console=Console(file=sys.stderr), transient=True)
        task = bar.add_task(f"loading {source}", total=total)
        bar.start()
        return bar, task
    return None


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Weight files of one folder."""

    files: tuple[Path, ...]
    owners: dict[str, Path] | None
    """File by tensor, by the index; None without an index."""


def weight_files(folder: Path) -> WeightFiles:
    """Return the weight files. Raises LoadError, which names the missing file,
    for a broken index."""
    try:
        owners = indexed(folder)
    except ValueError as error:
        raise LoadError(str(error)) from error
    files = unindexed(folder) if owners is None else tuple(sorted(set(owners.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise LoadError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files "
            f"that {INDEX} names: {', '.join(missing[:3])}"
        )
    if not files:
        raise LoadError(f"{folder} holds no *.safetensors")
    return WeightFiles(files, owners)


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of plain weights, by safetensors' names."""
CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Other types that a form of weights may use, held unchanged."""
TYPES = {**FLOATS, **CODES}
_MOST_BYTES = 100 << 20


class Place(NamedTuple):
    """One tensor's bytes."""

    dtype: str
    """Name of the type in safetensors."""
    shape: tuple[int, ...]
    offset: int
    """Offset from the start of the file."""


def places_in(path: Path) -> dict[str, Place]:
    """Return every tensor of the file. Raises LoadError."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _MOST_BYTES:
                raise LoadError(f"{path} cannot be read: its header has {length} bytes")
            header = json.loads(file.read(length))
        return {
            name: Place(each["dtype"], tuple(each["shape"]), 8 + length + each["data_offsets"][0])
            for name, each in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
