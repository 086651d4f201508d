"""Input and output files of a batch, checked before any request is sent.

The input is read twice: to check it and to send it. The output's name is replaced by another file
at the end. So a pipe must be copied first, and a device or the input itself must not be replaced.
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
    """Yield the input. A pipe or a device is first copied to an unnamed file. Raises OSError."""
    with open(source, "rb") as given:
        if Path(source).is_file():
            yield given
            return
        with tempfile.TemporaryFile() as kept:
            shutil.copyfileobj(given, kept)
            kept.seek(0)
            yield kept


def places(output: str, source: str) -> tuple[Path, Path]:
    """Return the file that answers are written to, and its final name. Links are followed. Raises
    InvalidParameter if either would replace the input or a file that is not regular."""
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
