"""Times of the last steps by their size, and a slope by the contexts of what is in them.

Sizes are in classes that double. Contexts differ from step to step at one size, by which the slope
is told: least squares over the deviations from each class's running means, pooled over the classes,
each step weighed by one over its class's time squared. Size is a second variable there, so that
more streams with contexts of their own are not taken for longer contexts.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

from tandem.protocol.steps import StepTimes

KEPT = 15
"""Steps of a class that count for its median."""
SLOPE_STEPS = 128
"""Steps before there is a slope."""
MEAN_SHARE = 1 / 64
"""Weight of the latest step in its class's means."""
MEMORY = 1 - 1 / 1024
"""What a step weighs when the next has come."""
STRAY = 3.0
"""Of its class's mean time: a step beyond it did something else (built kernels, waited)."""
RIDGE = 1e-3
"""Of the variance of contexts, added to it: a slope that nothing shows is 0."""
LEAST_SHARE = 0.1
"""Of a step's time, what is left to its size whatever the slope says."""


class _Step(NamedTuple):
    size: int
    context: int
    seconds: float


class StepClasses:
    """Of one kind of steps: decodes by their number, or prompt tokens by theirs."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[_Step]] = {}
        self._means: dict[int, list[float]] = {}
        """Size, context, seconds."""
        self._count = 0
        self._last: dict[int, int] = {}
        """Of each class, which of all steps was its latest."""
        self._learned = 0
        self._ss = self._sc = self._cc = self._st = self._ct = 0.0
        """Sums of products of deviations: s size, c context, t seconds."""

    def note(self, size: int, seconds: float, context: int = 0) -> bool:
        """A step of ``size``, above 0, with ``context`` tokens before its own, all together.
        Whether it is the first of its class."""
        number = size.bit_length()
        steps = self._steps.get(number)
        is_first = steps is None
        if steps is None:
            steps = self._steps[number] = deque(maxlen=KEPT)
        steps.append(_Step(size, context, seconds))
        self._count += 1
        self._last[number] = self._count
        means = self._means.get(number)
        if means is not None:
            self._learn(means, size, context, seconds)
        elif len(steps) == KEPT:  # medians, so that the first steps' kernels do not count
            self._means[number] = [float(median(column)) for column in zip(*steps, strict=True)]
        return is_first

    def forget_largest(self, unseen: int) -> None:
        """Drop the largest classes, as far as none of the last ``unseen`` steps was of theirs. For
        sizes that are chosen by these times: a class that seems too slow bars itself, and never
        shows that it is not; smaller ones bar nothing, as times never fall."""
        for number in sorted(self._steps, reverse=True):
            if self._count - self._last[number] < unseen:
                return
            del self._steps[number], self._last[number]
            self._means.pop(number, None)

    @property
    def known(self) -> bool:
        """Whether a step was noted."""
        return bool(self._steps)

    @property
    def slope(self) -> float:
        """Seconds for each token of a context, 0 or above; 0 while nothing shows it."""
        if self._learned < SLOPE_STEPS or self._cc <= 0:
            return 0.0
        cc = self._cc * (1 + RIDGE)
        alone = max(0.0, self._ct / cc)
        rest = self._ss * cc - self._sc * self._sc
        if self._ss <= 0 or rest <= 0:
            return alone
        by_size = self._st * cc - self._ct * self._sc
        slope = (self._ct * self._ss - self._st * self._sc) / rest
        return max(0.0, slope) if by_size >= 0 else alone

    def points(self) -> StepTimes:
        """Return (mean size, seconds at the median time of one) of each class, without what
        contexts take; never falling."""
        sizes: list[int] = []
        found: list[tuple[float, int]] = []
        slope = self.slope
        for number, steps in sorted(self._steps.items()):
            self._follow(number, steps)
            size = round(sum(each.size for each in steps) / len(steps))
            times = sorted(_own(each, slope) / each.size for each in steps)
            seconds = times[len(times) // 2] * size
            sizes.append(size)
            found.append((seconds, len(steps)))
        return tuple(zip(sizes, _never_falling(found), strict=True))

    def _learn(self, means: list[float], size: int, context: int, seconds: float) -> None:
        if seconds > STRAY * means[2]:
            return
        s, c, t = size - means[0], context - means[1], seconds - means[2]
        means[0] += MEAN_SHARE * s
        means[1] += MEAN_SHARE * c
        means[2] += MEAN_SHARE * t
        weight = 1.0 / (means[2] * means[2])
        self._ss = MEMORY * self._ss + weight * s * s
        self._sc = MEMORY * self._sc + weight * s * c
        self._cc = MEMORY * self._cc + weight * c * c
        self._st = MEMORY * self._st + weight * s * t
        self._ct = MEMORY * self._ct + weight * c * t
        self._learned += 1

    def _follow(self, number: int, steps: deque[_Step]) -> None:
        """Begin a class's means anew where most of its steps have become strays."""
        means = self._means.get(number)
        if means is not None and median(each.seconds for each in steps) > STRAY * means[2]:
            del self._means[number]


def _never_falling(found: list[tuple[float, int]]) -> list[float]:
    """Seconds, each measured so many times, as near to them as what never falls can be: where they
    fall, their weighed mean (isotonic regression by pooling adjacent violators, Ayer et al., 1955).
    One step that was held up so moves those of larger sizes little."""
    pools: list[tuple[float, int, int]] = []
    for seconds, weight in found:
        pool = (seconds, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            weights = before[1] + pool[1]
            mean = (before[0] * before[1] + pool[0] * pool[1]) / weights
            pool = (mean, weights, before[2] + pool[2])
        pools.append(pool)
    return [seconds for seconds, _, members in pools for _ in range(members)]


def _own(step: _Step, slope: float) -> float:
    """Seconds of a step without what contexts take."""
    return max(LEAST_SHARE * step.seconds, step.seconds - slope * step.context)
