"""Showing that weights come in: a bar on a terminal, and always one log line at the end.

``rich`` belongs to the command line's extra; a worker's image without it has the log line alone.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LOG = logging.getLogger(__name__)


class Progress:
    """Counts bytes. The bar appears with the first of them and disappears with ``finish``."""

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
        """Count ``count`` more bytes."""
        if self._wanted and self._bar is None:
            self._wanted = False
            self._bar = _bar(self._source, self._total)
        self.loaded += count
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self.loaded)

    def finish(self) -> None:
        """Take the bar away and log, once."""
        if self._done:
            return
        self._done = True
        if self._bar is not None:
            self._bar[0].stop()
        seconds = time.monotonic() - self._started
        LOG.info("loaded %.3f GB from %s in %.2f s", self.loaded / 1e9, self._source, seconds)


def _bar(source: str, total: int | None) -> tuple[Bar, TaskID] | None:
    """Return a started bar, or None if there is no terminal to show it."""
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
