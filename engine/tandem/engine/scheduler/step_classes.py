"""Times of the last steps by their size, and a slope by the contexts of their sequences.

Sizes are in classes that double. The slope is found from steps of one class, whose contexts differ:
least squares over the deviations from each class's running means, pooled over the classes. Each
step is weighed by one over its class's time squared. Size is a second variable, so that more
streams with contexts of their own do not count as longer contexts.
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
"""Factor by which each further step reduces a step's weight."""
STRAY = 3.0
"""Multiple of its class's mean time above which a step is ignored: it built kernels or waited."""
RIDGE = 1e-3
"""Share of the contexts' variance that is added to it, so that a slope without evidence is 0."""
LEAST_SHARE = 0.1
"""Share of a step's time that is always left to its size."""


class _Step(NamedTuple):
    size: int
    context: int
    seconds: float


class StepClasses:
    """Times of one kind of steps: decodes by number, or prompts by tokens."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[_Step]] = {}
        self._means: dict[int, list[float]] = {}
        """Size, context, seconds."""
        self._count = 0
        self._last: dict[int, int] = {}
        """Number of the latest step of each class."""
        self._learned = 0
        self._ss = self._sc = self._cc = self._st = self._ct = 0.0
        """Sums of products of deviations: s size, c context, t seconds."""

    def note(self, size: int, seconds: float, context: int = 0) -> bool:
        """Record a step of ``size``, above 0, with ``context`` tokens before its own, all together.
        Return whether it is the first of its class."""
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
        """Drop the largest classes that had none of the last ``unseen`` steps. For sizes chosen by
        these times: a class that seems too slow is never chosen, and so never measured again.
        Smaller classes exclude nothing, as times never fall."""
        for number in sorted(self._steps, reverse=True):
            if self._count - self._last[number] < unseen:
                return
            del self._steps[number], self._last[number]
            self._means.pop(number, None)

    @property
    def known(self) -> bool:
        """Return whether a step was recorded."""
        return bool(self._steps)

    @property
    def slope(self) -> float:
        """Return the seconds for each token of a context; 0 without evidence."""
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
        """Restart a class's means if most of its steps have become strays."""
        means = self._means.get(number)
        if means is not None and median(each.seconds for each in steps) > STRAY * means[2]:
            del self._means[number]


def _never_falling(found: list[tuple[float, int]]) -> list[float]:
    """Return the nearest never-falling times to these, each measured so many times. Falling ones
    get their weighed mean (isotonic regression by pooling adjacent violators, Ayer et al., 1955).
    One delayed step so changes those of larger sizes little."""
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
    """Return the seconds of a step without the cost of contexts."""
    return max(LEAST_SHARE * step.seconds, step.seconds - slope * step.context)
