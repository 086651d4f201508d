"""What a batch is read from, and where its answers go: both are looked at before any is asked.

The input is read twice, checked and then sent, and the output's name is taken by another file at
the end: a pipe has nothing to say the second time, and a device or the input itself would be gone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tandem.cli.places import check_place
from tandem.protocol.errors import InvalidParameter

OUTPUT = "--output-file"


@contextmanager
def opened(source: str) -> Iterator[BinaryIO]:
    """The input, at its start; a pipe or a device is read to its end first, into a file without a
    name. Raises OSError."""
    with open(source, "rb") as given:
        if Path(source).is_file():
            yield given
            return
        with tempfile.TemporaryFile() as kept:
            shutil.copyfileobj(given, kept)
            kept.seek(0)
            yield kept


def places(output: str, source: str) -> tuple[Path, Path]:
    """The file that answers are written to, and the one that it becomes when it is whole; links
    are followed. Raises InvalidParameter for what either would spoil."""
    if os.path.exists(output) and not os.path.isfile(output):
        raise InvalidParameter(OUTPUT, output, "a regular file, or a new one")
    target = Path(os.path.realpath(output))
    partial = target.with_name(f"{target.name}.part")
    check_place(OUTPUT, str(target))
    if os.path.lexists(partial) and (partial.is_symlink() or not partial.is_file()):
        raise InvalidParameter(OUTPUT, output, f"one beside which {partial} is a file, or nothing")
    for written in (target, partial):
        if written.exists() and os.path.exists(source) and written.samefile(source):
            raise InvalidParameter(OUTPUT, output, f"another file than the input, {source}")
    return partial, target
