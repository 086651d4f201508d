"""Progress of an offline batch: a bar on a terminal with ``rich``, else a line every ten
seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS = 10.0
"""Seconds between two lines."""
_END_SECONDS = 5.0


class BatchProgress:
    """Requests done of all, and tokens per second; nothing if not ``shown``."""

    def __init__(
        self,
        total: int,
        *,
        shown: bool,
        num_outputs: Callable[[], int] = int,
        every: float = LINE_SECONDS,
    ) -> None:
        """``num_outputs`` counts the engine's outputs, shown until a request has ended."""
        self._bar = _make_bar() if shown and sys.stderr.isatty() else None
        self._tokens = 0
        self._total, self._done = total, 0
        self._num_outputs = num_outputs
        self._every = every
        self._ended = threading.Event()
        self._lines: threading.Thread | None = None
        if self._bar is not None:
            self._task = self._bar.add_task("Answering", total=total, tokens=0)
        elif shown:
            self._lines = threading.Thread(target=self._print, name="progress", daemon=True)

    def done(self, num_tokens: int) -> None:
        """Count an ended request."""
        self._tokens += num_tokens
        self._done += 1
        if self._bar is not None:
            elapsed = self._bar.tasks[0].elapsed or 0.0
            rate = self._tokens / elapsed if elapsed > 0 else 0.0
            self._bar.update(self._task, advance=1, tokens=round(rate))

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        if self._lines is not None:
            self._lines.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None:
            self._lines.join(_END_SECONDS)

    def _print(self) -> None:
        started = last = time.monotonic()
        first = before = self._num_outputs()
        ended = False
        while not ended:
            ended = self._ended.wait(self._every)
            now, outputs = time.monotonic(), self._num_outputs()
            if ended:  # of the whole batch
                last, before = started, first
            rate = (self._tokens if ended else outputs - before) / max(now - last, 1e-9)
            print(
                f"tandem: {self._done:,}/{self._total:,} requests answered in "
                f"{now - started:.0f} s, {rate:,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
            last, before = now, outputs


def _make_bar() -> Progress | None:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
