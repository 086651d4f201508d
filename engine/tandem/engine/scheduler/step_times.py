"""What steps of this engine take: measured as they end, read by the planner and the load report.

A step's time is what its decodes take and what its prompt tokens add. Either is kept as the medians
of its last steps, in classes of sizes that double; a step that built kernels moves no median.
What prompt tokens add to decodes is kept apart from what they take alone, with a margin for how far
such steps are from their forecast. Contexts of decodes, which are read, count apart by a slope.
Those of prompts, which are multiplied, count as more tokens: how many is known from the model's
shape.
"""

from __future__ import annotations

from tandem.engine.scheduler.step_classes import STRAY, StepClasses
from tandem.protocol.steps import Crowd, StepTimes, crowd_seconds, seconds_at

MISSES = 0.01
"""Of the steps of prompts beside decodes, those that may take longer than their bound."""
PACE = 0.02
"""By what a miss widens the margin."""
WIDEST = 2.0
"""Margin at most: a device that is shared must not end all prompts."""
GROWTH, GROWTH_TOKENS = 1.5, 128
"""By how much wider than any before it a step of prompts beside decodes may be: a factor, and
tokens on top of it, so that the next graph is within reach. Small ones hide behind the reading of
weights, so that wide ones take longer than in proportion."""
FRESH = 16
"""Steps until the medians are looked up anew, but for the first step of a class."""
UNSEEN = 256
"""Steps of prompts beside decodes after which a width that none of them had is tried again."""
REFUTED = 0.8
"""Of what decodes were taken to need alone: a step of both that ended sooner says that they need
less."""
RESIDENCE_SHARE = 0.1
"""Weight of the latest request in the mean time that requests live here."""


class Margin:
    """A quantile of how long steps take over their forecast, followed step by step: a miss moves it
    up by as much as a hundred steps without one move it down (Robbins and Monro, 1951), so that in
    the long run one of a hundred is over it, whatever the distribution, and however it changes."""

    def __init__(self) -> None:
        self.ratio = 1.0

    def note(self, ratio: float) -> None:
        """A step took ``ratio`` of what was foretold."""
        moved = PACE * (1 - MISSES) if ratio > self.ratio else -PACE * MISSES
        self.ratio = min(WIDEST, max(1.0, self.ratio + moved))


class MeasuredSteps:
    """Fed by the engine after each step."""

    def __init__(self) -> None:
        self._decode = StepClasses()
        self._inferred = StepClasses()
        """Of decodes, by steps of both, as long as no step of decodes alone was made."""
        self._prompt = StepClasses()
        self._beside = StepClasses()
        """The only ones whose largest are forgotten: of the others, no size is chosen by these
        times. As many decodes are made as there are, and prompts alone in steps of any width."""
        self._margin = Margin()
        self._stale = 0
        self.decode_steps: StepTimes = ()
        """Seconds of steps of decodes alone, without what their contexts take."""
        self.context_s = 0.0
        """Seconds for each token of a decode's context."""
        self.prompt_steps: StepTimes = ()
        """Seconds that prompt tokens take, or add to a step of decodes, at a prompt's start."""
        self.beside_steps: StepTimes = ()
        """Seconds that they add to a step of decodes, which has read the weights already."""
        self.steepness = 0.0
        """By what share a prompt's token takes longer for each token before it."""
        self.residence_s = 0.0
        """Mean seconds from a request's first step to its end here; 0 while unknown."""

    def note(self, crowd: Crowd, prompt_tokens: int, seconds: float) -> None:
        """A step of these decodes and so many prompt tokens took ``seconds``. Prompt tokens are
        such of a prompt's start; others count for as many as take their time."""
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
        """A request ended so long after its first step."""
        known = self.residence_s
        self.residence_s = known + RESIDENCE_SHARE * (seconds - known) if known else seconds

    def _infer(self, crowd: Crowd, prompt_tokens: int, seconds: float) -> None:
        """What decodes took of a step of both, while none was made of decodes alone: what prompt
        tokens leave, and no less than reading all weights, which the step of the fewest prompt
        tokens did as well. What is left is the difference of two long times, and may be nothing."""
        left = seconds - seconds_at(self.prompt_steps, prompt_tokens)
        fewest = min(self.prompt_steps[0][1], seconds)
        self._inferred.note(crowd.streams, max(left, fewest), crowd.context)

    def _decodes(self) -> StepClasses:
        return self._decode if self._decode.known else self._inferred

    def refresh(self) -> None:
        """Look the medians up."""
        self._stale = 0
        decodes = self._decodes()
        self.context_s = decodes.slope
        self.decode_steps = decodes.points()
        self.prompt_steps = self._prompt.points()
        self._beside.forget_largest(UNSEEN)
        self.beside_steps = self._beside.points()

    @property
    def margin(self) -> float:
        """What a step of prompts beside decodes takes over its forecast, but for one of a hundred:
        1 or more."""
        return self._margin.ratio

    def decode_seconds(self, crowd: Crowd) -> float:
        """Of a step of these decodes alone; 0 while unknown."""
        return crowd_seconds(self.decode_steps, self.context_s, crowd)

    def prompt_tokens_within(self, crowd: Crowd, seconds: float, most: int) -> int:
        """Prompt tokens, of a prompt's start, that a step of ``crowd`` may hold to end within
        ``seconds`` in all but one of a hundred steps, ``most`` at most, and 0 while no prompt was
        measured. Where no decode was, a step of a few is taken to need what the step of the fewest
        prompt tokens did: either reads all weights once. Where no step of both was, prompt tokens
        are taken to need what they do alone; where some were, the next is little wider than
        those, so that a width that seemed too slow comes back step by step once it is forgotten."""
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
