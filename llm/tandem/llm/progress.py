"""The bar that offline batches draw on a terminal.

``rich`` belongs to the command line's and the hub's extras; without it there is no bar.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress


class BatchProgress:
    """Requests done of all, and tokens a second. Nothing is drawn where ``shown`` is false."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar = _make_bar() if shown else None
        self._tokens = 0
        if self._bar is not None:
            self._task = self._bar.add_task("Answering", total=total, tokens=0)

    def done(self, num_tokens: int) -> None:
        """One more request has ended, with ``num_tokens`` generated."""
        self._tokens += num_tokens
        if self._bar is not None:
            elapsed = self._bar.tasks[0].elapsed or 0.0
            rate = self._tokens / elapsed if elapsed > 0 else 0.0
            self._bar.update(self._task, advance=1, tokens=round(rate))

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


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
