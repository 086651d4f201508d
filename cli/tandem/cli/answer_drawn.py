"""Output of an answer of `tandem chat` as it arrives: reasoning and content.

On a terminal reasoning is dim. Otherwise standard output has the answer only, so that it can be
saved or piped, and the rest goes to standard error.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_MARK = "[thought] "
"""Prefix of reasoning if the output has no dim text."""


class AnswerDrawn:
    """Writer of one answer. Call ``end`` even after an error, or the terminal stays dim."""

    def __init__(self) -> None:
        self.text = ""
        """Content so far, without reasoning."""
        self._thinks = False
        self._together = sys.stdout.isatty()
        """True if content and reasoning go to the same terminal."""
        self._aside = sys.stdout if self._together else sys.stderr
        self._dims = self._aside.isatty() and os.environ.get("TERM") != "dumb"

    def think(self, piece: str) -> None:
        """Write the next piece of reasoning."""
        if piece and not self._thinks:
            self._thinks = True
            gap = "\n\n" if self.text and self._together else ""
            _write(self._aside, gap + (_DIM if self._dims else _MARK))
        _write(self._aside, piece)

    def say(self, piece: str) -> None:
        """Write the next piece of content."""
        if piece:
            self._leave_thought("\n\n" if self._together else "\n")
        self.text += piece
        _write(sys.stdout, piece)

    def note(self, words: str) -> None:
        """Write how the answer ended, if not by itself."""
        self._leave_thought("" if self._together else "\n")
        _write(self._aside, f" [{words}]" if self._together else f"[{words}]\n")

    def end(self) -> None:
        """End the last line."""
        self._leave_thought("" if self._together else "\n")
        _write(sys.stdout, "\n")

    def _leave_thought(self, gap: str) -> None:
        if self._thinks:
            _write(self._aside, (_PLAIN if self._dims else "") + gap)
            self._thinks = False  # behind it: what breaks it off ends with ``end``


def _write(stream: TextIO, text: str) -> None:
    print(text, end="", file=stream, flush=True)
