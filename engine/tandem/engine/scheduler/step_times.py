"""What steps of this engine take: measured as they end, read by the planner and the load report.

A step's time is what its decodes take and what its prompt tokens add. Either is kept as the medians
of its last steps, in classes of sizes that double; a step that built kernels moves no median.
"""

from __future__ import annotations

from collections import deque

from tandem.protocol.steps import StepTimes, decode_seconds, seconds_at

KEPT = 15
"""Steps of a class that count."""
FRESH = 16
"""Steps until the medians are looked up anew."""
RESIDENCE_SHARE = 0.1
"""Weight of the latest request in the mean time that requests live here."""


class _Classes:
    """Sizes and seconds of the last steps, by the power of two above their size."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, int]]] = {}

    def note(self, size: int, seconds: float) -> None:
        """A step of ``size``, above 0."""
        steps = self._steps.get(size.bit_length())
        if steps is None:
            steps = self._steps[size.bit_length()] = deque(maxlen=KEPT)
        steps.append((seconds / size, size))

    def points(self) -> StepTimes:
        """(mean size, seconds at the median time of one) of each class; never falling."""
        points: list[tuple[int, float]] = []
        for _, steps in sorted(self._steps.items()):
            size = round(sum(each for _, each in steps) / len(steps))
            seconds = sorted(steps)[len(steps) // 2][0] * size
            points.append((size, max(seconds, points[-1][1] if points else 0.0)))
        return tuple(points)


class MeasuredSteps:
    """Fed by the engine after each step."""

    def __init__(self) -> None:
        self._decode = _Classes()
        self._prompt = _Classes()
        self._stale = 0
        self.decode_steps: StepTimes = ()
        """Seconds of steps of decodes alone."""
        self.prompt_steps: StepTimes = ()
        """Seconds that prompt tokens take, or add to a step of decodes."""
        self.residence_s = 0.0
        """Mean seconds from a request's first step to its end here; 0 while unknown."""

    def note(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many decodes and prompt tokens took ``seconds``."""
        if seconds <= 0:
            return
        if not prompt_tokens:
            self._decode.note(decodes, seconds)
        elif not decodes:
            self._prompt.note(prompt_tokens, seconds)
        elif self.decode_steps:
            added = seconds - decode_seconds(self.decode_steps, decodes)
            if added > 0:
                self._prompt.note(prompt_tokens, added)
        self._stale += 1
        if self._stale >= FRESH or not (self.decode_steps and self.prompt_steps):
            self.refresh()

    def note_end(self, seconds: float) -> None:
        """A request ended so long after its first step."""
        known = self.residence_s
        self.residence_s = known + RESIDENCE_SHARE * (seconds - known) if known else seconds

    def refresh(self) -> None:
        """Look the medians up."""
        self._stale = 0
        self.decode_steps = self._decode.points()
        self.prompt_steps = self._prompt.points()

    def prompt_tokens_within(self, decodes: int, seconds: float, most: int) -> int | None:
        """Prompt tokens that a step of ``decodes`` may hold to end within ``seconds``, ``most`` at
        most; None while too little was measured to say."""
        if not self.decode_steps or not self.prompt_steps:
            return None
        left = seconds - decode_seconds(self.decode_steps, decodes)
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if seconds_at(self.prompt_steps, middle) <= left:
                low = middle
            else:
                high = middle - 1
        return low
