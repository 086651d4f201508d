"""Measured times of this engine's steps, read by the planner and the load report.

A step's time is that of its decodes plus the time that its prompt tokens add. Both are kept as the
medians of the last steps, in classes of sizes that double; a step that built kernels moves no
median. Prompt tokens with decodes are kept apart from those alone, with a margin for the error of
their forecast. Contexts of decodes, which are read, count by a slope. Those of prompts, which are
multiplied, count as more tokens, by the model's shape.
"""

from __future__ import annotations

from tandem.engine.scheduler.step_classes import STRAY, StepClasses
from tandem.protocol.steps import Crowd, StepTimes, crowd_seconds, seconds_at

MISSES = 0.01
"""Share of the steps of prompts with decodes that may take longer than their bound."""
PACE = 0.02
"""Amount by which a miss widens the margin."""
WIDEST = 2.0
"""Largest margin: a shared device must not stop all prompts."""
GROWTH, GROWTH_TOKENS = 1.5, 128
"""Largest growth of a step of prompts with decodes over any before it: a factor, and tokens added
to it, so that the next graph is within reach. Small steps are hidden by the reading of weights, so
that wide ones take longer than in proportion."""
FRESH = 16
"""Steps until the medians are computed again, except for the first step of a class."""
UNSEEN = 256
"""Steps of prompts with decodes after which a width that none of them had is tried again."""
REFUTED = 0.8
"""Share of the decodes' forecast: a step of both that ended sooner shows that it is too high."""
RESIDENCE_SHARE = 0.1
"""Weight of the latest request in the mean residence time."""


class Margin:
    """A quantile of the ratio of steps' times to their forecasts, updated with each step. A miss
    moves it up as far as a hundred steps without one move it down (Robbins and Monro, 1951). In the
    long run one step of a hundred exceeds it, for any distribution."""

    def __init__(self) -> None:
        self.ratio = 1.0

    def note(self, ratio: float) -> None:
        """Record a step that took ``ratio`` of its forecast."""
        moved = PACE * (1 - MISSES) if ratio > self.ratio else -PACE * MISSES
        self.ratio = min(WIDEST, max(1.0, self.ratio + moved))


class MeasuredSteps:
    """Times of steps; the engine records each step at its end."""

    def __init__(self) -> None:
        self._decode = StepClasses()
        self._inferred = StepClasses()
        """Decode times inferred from steps of both, until a step of decodes alone was made."""
        self._prompt = StepClasses()
        self._beside = StepClasses()
        """Times of prompts with decodes; only their largest classes are forgotten. No other sizes
        are chosen by these times: decodes come in any number, prompts alone in any width."""
        self._margin = Margin()
        self._stale = 0
        self.decode_steps: StepTimes = ()
        """Seconds of steps of decodes alone, without the cost of their contexts."""
        self.context_s = 0.0
        """Seconds for each token of a decode's context."""
        self.prompt_steps: StepTimes = ()
        """Seconds that prompt tokens take, or add to a step of decodes, at a prompt's start."""
        self.beside_steps: StepTimes = ()
        """Seconds that they add to a step of decodes, which has already read the weights."""
        self.steepness = 0.0
        """Share by which a prompt's token takes longer for each token before it."""
        self.residence_s = 0.0
        """Mean seconds from a request's first step to its end here; 0 while unknown."""

    def note(self, crowd: Crowd, prompt_tokens: int, seconds: float) -> None:
        """Record the seconds of a step of these decodes and prompt tokens. Prompt tokens are of a
        prompt's start; later ones count as the number that takes their time."""
        if seconds <= 0:
            return
        is_first = False
        if not prompt_tokens:
            self._decode.note(crowd.streams, seconds, crowd.context)
        elif not crowd.streams:
            self._prompt.note(prompt_tokens, seconds)
        elif self.decode_steps:
            alone = self.decode_seconds(crowd)
            if self.beside_steps:
                foretold = alone + seconds_at(self.beside_steps, prompt_tokens)
                if seconds < STRAY * foretold:  # beyond, no smaller step would have been in time
                    self._margin.note(seconds / foretold)
            if seconds > alone:
                self._prompt.note(prompt_tokens, seconds - alone)
                is_first = self._beside.note(prompt_tokens, seconds - alone)
            elif seconds < REFUTED * alone:  # who goes by too much would take no prompts, for ever
                is_first = self._decodes().note(crowd.streams, seconds, crowd.context)
        elif self.prompt_steps:
            self._infer(crowd, prompt_tokens, seconds)
        self._stale += 1
        if is_first or self._stale >= FRESH or not (self.decode_steps and self.prompt_steps):
            self.refresh()

    def note_end(self, seconds: float) -> None:
        """Record a request's seconds from its first step to its end."""
        known = self.residence_s
        self.residence_s = known + RESIDENCE_SHARE * (seconds - known) if known else seconds

    def _infer(self, crowd: Crowd, prompt_tokens: int, seconds: float) -> None:
        """Infer the decodes' time from a step of both, while there was none of decodes alone: the
        rest after prompt tokens, but at least the reading of all weights, as the step of the fewest
        prompt tokens did. The rest is the difference of two long times, and may be near 0."""
        left = seconds - seconds_at(self.prompt_steps, prompt_tokens)
        fewest = min(self.prompt_steps[0][1], seconds)
        self._inferred.note(crowd.streams, max(left, fewest), crowd.context)

    def _decodes(self) -> StepClasses:
        return self._decode if self._decode.known else self._inferred

    def refresh(self) -> None:
        """Compute the medians again."""
        self._stale = 0
        decodes = self._decodes()
        self.context_s = decodes.slope
        self.decode_steps = decodes.points()
        self.prompt_steps = self._prompt.points()
        self._beside.forget_largest(UNSEEN)
        self.beside_steps = self._beside.points()

    @property
    def margin(self) -> float:
        """Return the ratio of time to forecast, 1 or more, that one of a hundred steps of prompts
        with decodes exceeds."""
        return self._margin.ratio

    def decode_seconds(self, crowd: Crowd) -> float:
        """Return the seconds of a step of these decodes alone; 0 while unknown."""
        return crowd_seconds(self.decode_steps, self.context_s, crowd)

    def prompt_tokens_within(self, crowd: Crowd, seconds: float, most: int) -> int:
        """Return how many prompt tokens, at a prompt's start, fit in a step of ``crowd`` that ends
        within ``seconds``, except in one of a hundred steps. It is ``most`` at most, and 0 while no
        prompt was measured. Without measured decodes, a step of a few counts as one of the fewest
        prompt tokens: both read all weights once. Without steps of both, prompt tokens count as
        alone. Otherwise the next is little wider than those, so that a forgotten width comes back
        step by step."""
        if not self.prompt_steps:
            return 0
        points = self.beside_steps or self.prompt_steps
        fewest = self.prompt_steps[0][1]
        left = seconds / self.margin - (self.decode_seconds(crowd) or fewest)
        low, high = 0, most
        if self.beside_steps:
            high = min(most, int(GROWTH * self.beside_steps[-1][0]) + GROWTH_TOKENS)
        while low < high:
            middle = (low + high + 1) // 2
            if seconds_at(points, middle) <= left:
                low = middle
            else:
                high = middle - 1
        return low
