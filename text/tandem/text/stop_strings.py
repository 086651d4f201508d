"""Search for stop strings in text that arrives in pieces, independent of how it is split.

The rule: of all places where a stop string ends, the first. If several end there, the one that
starts first. So the result depends on the text only, never on token borders. Only text that may
still become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

MAX_STOP_CHARS = 1024
"""Maximum length of a stop string: bounds the text held back and the work per token."""


def check_stops(stops: Sequence[str]) -> None:
    """Raise InvalidParameter for a stop string that is too long."""
    for stop in stops:
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidParameter("stop", stop, f"strings of at most {MAX_STOP_CHARS} characters")


def check_stopping(params: SamplingParams) -> None:
    """Raise InvalidParameter for stop strings of ``params`` that cannot be searched for."""
    check_stops(params.stop)
    if params.stop and not params.detokenize:
        raise InvalidParameter(
            "stop", params.stop, "only with detokenize=true: stop strings are found in text"
        )


class StopMatcher:
    """Search in the text of one choice. ``found`` is the stop string that ended it, or None."""

    __slots__ = ("_held", "_include", "_letters", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._letters = frozenset("".join(stop[:-1] for stop in stops))
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Return the text that may be shown after ``text``. Not callable once ``found`` is set.

        Unarmed, a stop string that ends in ``text`` is ignored (``min_tokens``). One that only
        begins there is still held back.
        """
        if not text:
            return ""
        window = self._held + text
        if armed:
            start, stop = self._first(window)
            if stop is not None:
                self.found = stop
                self._held = ""
                return window[: start + len(stop)] if self._include else window[:start]
        if window[-1] not in self._letters:
            self._held = ""
            return window
        keep = self._may_become(window)
        self._held = window[keep:]
        return window[:keep]

    def end(self) -> str:
        """Return the text that was held back, if the output ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first(self, window: str) -> tuple[int, str | None]:
        """Return start and text of the match that ends first, beyond the held text."""
        best_end, best_start, best = len(window) + 1, 0, None
        held = len(self._held)
        for stop in self._stops:
            start = window.find(stop, max(0, held - len(stop) + 1), best_end)
            if start < 0:
                continue
            end = start + len(stop)
            if end < best_end or start < best_start:
                best_end, best_start, best = end, start, stop
        return best_start, best

    def _may_become(self, window: str) -> int:
        """Return the start of the longest suffix of ``window`` that begins a stop string."""
        earliest = len(window)
        for stop in self._stops:
            start = max(0, len(window) - len(stop) + 1)
            while (start := window.find(stop[0], start)) >= 0 and start < earliest:
                if stop.startswith(window[start:]):
                    earliest = start
                start += 1
        return earliest
