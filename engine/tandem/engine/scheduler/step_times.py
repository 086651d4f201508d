"""What steps of this engine take: measured as they end, read by the planner and the load report.

A step's time is what its decodes take and what its prompt tokens add. Either is kept as the medians
of its last steps, in classes of sizes that double; a step that built kernels moves no median.
Contexts of decodes, which are read, count apart by a slope. Those of prompts, which are multiplied,
count as more tokens: how many is known from the model's shape.

Half of all steps take longer than medians say. Who promises a bound asks by how much: steps of
decodes and prompts are compared with what was foretold of them, and nearly all of the last ones
kept to that times ``overrun``.
"""

from __future__ import annotations

from collections import deque

from tandem.engine.scheduler.step_classes import STRAY, StepClasses
from tandem.protocol.steps import Crowd, StepTimes, crowd_seconds, seconds_at

FRESH = 16
"""Steps until the medians are looked up anew."""
FORETOLD = 256
"""Last steps of decodes and prompts that are compared with what was foretold of them."""
LEAST_FORETOLD = 32
"""Of them, before they are gone by."""
KEPT_WITHIN = 0.98
"""Share of them that took at most ``overrun`` times what was foretold."""
RESIDENCE_SHARE = 0.1
"""Weight of the latest request in the mean time that requests live here."""


class MeasuredSteps:
    """Fed by the engine after each step."""

    def __init__(self) -> None:
        self._decode = StepClasses()
        self._prompt = StepClasses()
        self._overruns: deque[float] = deque(maxlen=FORETOLD)
        self._stale = 0
        self.overrun = 1.0
        """How many times longer than foretold steps of decodes and prompts may take; 1 at least."""
        self.decode_steps: StepTimes = ()
        """Seconds of steps of decodes alone, without what their contexts take."""
        self.context_s = 0.0
        """Seconds for each token of a decode's context."""
        self.prompt_steps: StepTimes = ()
        """Seconds that prompt tokens take, or add to a step of decodes, at a prompt's start."""
        self.steepness = 0.0
        """By what share a prompt's token takes longer for each token before it."""
        self.residence_s = 0.0
        """Mean seconds from a request's first step to its end here; 0 while unknown."""

    def note(self, crowd: Crowd, prompt_tokens: int, seconds: float) -> None:
        """A step of these decodes and so many prompt tokens took ``seconds``. Prompt tokens are
        such of a prompt's start; others count for as many as take their time."""
        if seconds <= 0:
            return
        if not prompt_tokens:
            self._decode.note(crowd.streams, seconds, crowd.context)
        elif not crowd.streams:
            self._prompt.note(prompt_tokens, seconds)
        elif self.decode_steps:
            alone = self.decode_seconds(crowd)
            self._compare(alone, prompt_tokens, seconds)
            added = seconds - alone
            if added > 0:
                self._prompt.note(prompt_tokens, added)
        elif self.prompt_steps:  # whose prompts never end makes no step of decodes alone
            left = seconds - seconds_at(self.prompt_steps, prompt_tokens)
            if left > 0:
                self._decode.note(crowd.streams, left, crowd.context)
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
        self.context_s = self._decode.slope
        self.decode_steps = self._decode.points()
        self.prompt_steps = self._prompt.points()
        if len(self._overruns) >= LEAST_FORETOLD:
            ordered = sorted(self._overruns)
            self.overrun = max(1.0, ordered[int(KEPT_WITHIN * (len(ordered) - 1))])

    def decode_seconds(self, crowd: Crowd) -> float:
        """Of a step of these decodes alone; 0 while unknown."""
        return crowd_seconds(self.decode_steps, self.context_s, crowd)

    def prompt_tokens_within(self, crowd: Crowd, seconds: float, most: int) -> int:
        """Prompt tokens, of a prompt's start, that a step of ``crowd`` may hold to end within
        ``seconds`` even where it takes ``overrun`` times what is foretold; ``most`` at most, and 0
        while no prompt was measured. Where no decode was, a step of a few is taken to need what the
        step of the fewest prompt tokens did: either reads all weights once."""
        if not self.prompt_steps:
            return 0
        fewest = self.prompt_steps[0][1]
        left = seconds / self.overrun - (self.decode_seconds(crowd) or fewest)
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if seconds_at(self.prompt_steps, middle) <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def _compare(self, alone: float, prompt_tokens: int, seconds: float) -> None:
        """A step took ``seconds``, ``alone`` being foretold of its decodes. Strays did something
        else, which no smaller step would have spared."""
        if not self.prompt_steps:
            return
        times = seconds / (alone + seconds_at(self.prompt_steps, prompt_tokens))
        if times < STRAY:
            self._overruns.append(times)
