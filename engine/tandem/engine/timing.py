"""Measured times of steps, and their predictions: chunks, padding, decode batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from tandem.engine.config.scheduler import LEAST_CHUNK_TOKENS, SchedulerConfig
from tandem.engine.kv_memory import StepSize
from tandem.protocol.messages import DecodeBatch, StepTimes, decode_batch_seconds, seconds_at

KEPT = 15
"""Steps of a class that count for its median."""
SLOPE_STEPS = 128
"""Steps before there is a slope."""
MEAN_SHARE = 1 / 64
"""Weight of the latest step in its class's means."""
MEMORY = 1 - 1 / 1024
"""Factor by which each further step reduces a step's weight."""
STRAY = 3.0
"""Multiple of its class's mean time above which a step is ignored."""
RIDGE = 1e-3
"""Share of the contexts' variance that is added to it, so that a slope without evidence is 0."""
LEAST_SHARE = 0.1
"""Minimum share of a step's time that is due to its size."""


class _Step(NamedTuple):
    size: int
    context: int
    seconds: float


class StepClasses:
    """Measured times of one kind of steps, by size: the number of decodes, or of prompt tokens."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[_Step]] = {}
        self._means: dict[int, list[float]] = {}
        """Size, context, seconds."""
        self._count = 0
        self._last: dict[int, int] = {}
        self._learned = 0
        self._ss = self._sc = self._cc = self._st = self._ct = 0.0
        """Sums of products of deviations: s size, c context, t seconds."""

    def note(self, size: int, seconds: float, context: int = 0) -> bool:
        """Record a step of ``size``, above 0, with ``context`` tokens before its own in total.
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
        """Drop the largest classes without any of the last ``unseen`` steps. Otherwise a class that
        seems too slow would never be chosen and measured again."""
        for number in sorted(self._steps, reverse=True):
            if self._count - self._last[number] < unseen:
                return
            del self._steps[number], self._last[number]
            self._means.pop(number, None)

    @property
    def known(self) -> bool:
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
        """Return (mean size, median seconds) of each class, without the cost of contexts; never
        falling."""
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
        means = self._means.get(number)
        if means is not None and median(each.seconds for each in steps) > STRAY * means[2]:
            del self._means[number]


def _never_falling(found: list[tuple[float, int]]) -> list[float]:
    """Return the nearest never-falling times, weighed by the number of measurements. Isotonic
    regression by pooling adjacent violators (Ayer et al., 1955)."""
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
    return max(LEAST_SHARE * step.seconds, step.seconds - slope * step.context)


class Chunks:
    """Sizes of chunks in the steps of one scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        whole = config.max_num_batched_tokens
        self._usual = config.long_prefill_token_threshold or whole
        self._alone = config.lone_prefill_token_threshold or self._usual
        self.most_begun = config.max_num_begun_tokens or whole

    def count(self, remaining: int, most: int, *, alone: bool) -> int:
        """Return the size of a prompt's next chunk, at most ``most`` tokens. ``alone``: no other
        prompt waits or is in the step."""
        return min(remaining, most, self._alone if alone else self._usual)


def cost_behind(start: int, count: int, steepness: float) -> float:
    """Return the cost of ``count`` tokens after ``start``, in tokens of a prompt's start. Each
    costs ``steepness`` for each token before it."""
    return count * (1 + steepness * (start + count / 2))


class Padding:
    """Padding of steps to graphs of ``sizes``, in the order in which they are chosen. Without
    graphs, a step is not padded."""

    def __init__(self, sizes: Sequence[StepSize] = ()) -> None:
        self._sizes = tuple(each for each in sizes if each.chunks)

    def tokens(self, decodes: int, chunk_tokens: int, chunks: int) -> int | None:
        """Return the computed tokens of a step with prompts; None if no graph holds it."""
        for size in self._sizes:
            if (
                decodes <= size.decodes
                and chunk_tokens <= size.chunk_tokens
                and chunks <= size.chunks
            ):
                return size.decodes + size.chunk_tokens
        return None

    def weight(self, decodes: int, chunk_tokens: int, chunks: int) -> int:
        """Return the tokens in addition to the decodes, padding included."""
        return (self.tokens(decodes, chunk_tokens, chunks) or decodes + chunk_tokens) - decodes

    def has_beside(self, decodes: int) -> bool:
        """Return whether a graph holds the decodes and the smallest chunk of a prompt."""
        return self.tokens(decodes, LEAST_CHUNK_TOKENS, 1) is not None


class StepRoom:
    """Room for prompts in a time-bounded step with decodes, in tokens of a prompt's start. A step
    that fits a graph stays within one."""

    def __init__(self, padding: Padding, decodes: int, budget: int, steepness: float) -> None:
        self._padding, self._decodes = padding, decodes
        self._budget, self._steepness = budget, steepness
        self._in_graph = padding.has_beside(decodes)
        self._tokens = self._chunks = 0
        self._full = False
        self._seen = 0.0
        """Cost of attention to the tokens before the chunks, in tokens of a prompt's start."""

    def most(self, start: int, limit: int) -> int:
        """Return the tokens after ``start`` that one more prompt may have, at most ``limit``. The
        first prompt gets at least the smallest chunk."""
        low, high = 0, limit
        if not self._chunks:
            low = min(limit, LEAST_CHUNK_TOKENS)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(start, middle):
                low = middle
            else:
                high = middle - 1
        self._full = low == 0
        return low

    @property
    def is_full(self) -> bool:
        """Return whether the smallest chunk of another prompt does not fit, or did not at the last
        try."""
        return self._full or (self._chunks > 0 and not self._fits(0, LEAST_CHUNK_TOKENS))

    def take(self, start: int, count: int) -> None:
        self._seen += cost_behind(start, count, self._steepness) - count
        self._tokens += count
        self._chunks += 1

    def _fits(self, start: int, count: int) -> bool:
        tokens, chunks = self._tokens + count, self._chunks + 1
        if self._in_graph and self._padding.tokens(self._decodes, tokens, chunks) is None:
            return False
        seen = self._seen + cost_behind(start, count, self._steepness) - count
        return self._padding.weight(self._decodes, tokens, chunks) + seen <= self._budget


MISSES = 0.01
"""Share of the steps of prompts with decodes that may take longer than their bound."""
PACE = 0.02
"""Amount by which a miss widens the margin."""
WIDEST = 2.0
"""Largest margin: a shared device must not stop all prompts."""
GROWTH, GROWTH_TOKENS = 1.5, 128
"""Largest growth of a step of prompts with decodes over any before it: a factor, and tokens added
to it, to reach the next graph."""
FRESH = 16
"""Steps until the medians are computed again, except for the first step of a class."""
UNSEEN = 256
"""Steps of prompts with decodes after which an unused width is tried again."""
REFUTED = 0.8
"""Share of the decodes' forecast: a shorter step of both refutes it."""
RESIDENCE_SHARE = 0.1
"""Weight of the latest request in the mean residence time."""


class Margin:
    """Quantile of the ratio of steps' times to their forecasts, updated with each step (Robbins and
    Monro, 1951). In the long run the share ``MISSES`` exceeds it."""

    def __init__(self) -> None:
        self.ratio = 1.0

    def note(self, ratio: float) -> None:
        moved = PACE * (1 - MISSES) if ratio > self.ratio else -PACE * MISSES
        self.ratio = min(WIDEST, max(1.0, self.ratio + moved))


class MeasuredSteps:
    """Times of steps, recorded by the engine."""

    def __init__(self) -> None:
        self._decode = StepClasses()
        self._inferred = StepClasses()
        """Decode times inferred from steps of both, until a step with decodes only is measured."""
        self._prompt = StepClasses()
        self._beside = StepClasses()
        """Times of prompts with decodes; only their largest classes are forgotten."""
        self._margin = Margin()
        self._stale = 0
        self.decode_steps: StepTimes = ()
        """Seconds of steps with decodes only, without the cost of their contexts."""
        self.context_s = 0.0
        self.prompt_steps: StepTimes = ()
        """Seconds of prompt tokens at a prompt's start, alone or with decodes."""
        self.mixed_steps: StepTimes = ()
        """Seconds that they add to a step of decodes."""
        self.steepness = 0.0
        """Share by which a prompt's token takes longer for each token before it."""
        self.residence_s = 0.0
        """Mean seconds from a request's first step to its end here; 0 while unknown."""

    def note(self, decode_batch: DecodeBatch, prompt_tokens: int, seconds: float) -> None:
        """Record a step's seconds. Prompt tokens are converted to those of a prompt's start."""
        if seconds <= 0:
            return
        is_first = False
        if not prompt_tokens:
            self._decode.note(decode_batch.streams, seconds, decode_batch.context)
        elif not decode_batch.streams:
            self._prompt.note(prompt_tokens, seconds)
        elif self.decode_steps:
            alone = self.decode_seconds(decode_batch)
            if self.mixed_steps:
                foretold = alone + seconds_at(self.mixed_steps, prompt_tokens)
                if seconds < STRAY * foretold:  # beyond, smaller steps would be late, too
                    self._margin.note(seconds / foretold)
            if seconds > alone:
                self._prompt.note(prompt_tokens, seconds - alone)
                is_first = self._beside.note(prompt_tokens, seconds - alone)
            elif seconds < REFUTED * alone:  # too high a forecast would exclude prompts for good
                is_first = self._decodes().note(decode_batch.streams, seconds, decode_batch.context)
        elif self.prompt_steps:
            self._infer(decode_batch, prompt_tokens, seconds)
        self._stale += 1
        if is_first or self._stale >= FRESH or not (self.decode_steps and self.prompt_steps):
            self.refresh()

    def note_end(self, seconds: float) -> None:
        known = self.residence_s
        self.residence_s = known + RESIDENCE_SHARE * (seconds - known) if known else seconds

    def _infer(self, decode_batch: DecodeBatch, prompt_tokens: int, seconds: float) -> None:
        """Infer the decodes' time from a step of both while there was none of decodes only: the
        rest after the prompt tokens, at least the reading of all weights."""
        left = seconds - seconds_at(self.prompt_steps, prompt_tokens)
        fewest = min(self.prompt_steps[0][1], seconds)
        self._inferred.note(decode_batch.streams, max(left, fewest), decode_batch.context)

    def _decodes(self) -> StepClasses:
        return self._decode if self._decode.known else self._inferred

    def refresh(self) -> None:
        self._stale = 0
        decodes = self._decodes()
        self.context_s = decodes.slope
        self.decode_steps = decodes.points()
        self.prompt_steps = self._prompt.points()
        self._beside.forget_largest(UNSEEN)
        self.mixed_steps = self._beside.points()

    @property
    def margin(self) -> float:
        """Return the ratio of time to forecast, 1 or more, that one of a hundred steps of prompts
        with decodes exceeds."""
        return self._margin.ratio

    def decode_seconds(self, decode_batch: DecodeBatch) -> float:
        """Return the seconds of a step with these decodes only; 0 while unknown."""
        return decode_batch_seconds(self.decode_steps, self.context_s, decode_batch)

    def prompt_tokens_within(self, decode_batch: DecodeBatch, seconds: float, most: int) -> int:
        """Return the prompt tokens (at a prompt's start, at most ``most``) that fit into a step
        with ``decode_batch`` within ``seconds``; 0 before a prompt was measured.

        Unmeasured decodes count as the smallest prompt step. Without steps of both, prompt tokens
        count as alone; later steps grow little by little.
        """
        if not self.prompt_steps:
            return 0
        points = self.mixed_steps or self.prompt_steps
        fewest = self.prompt_steps[0][1]
        left = seconds / self.margin - (self.decode_seconds(decode_batch) or fewest)
        low, high = 0, most
        if self.mixed_steps:
            high = min(most, int(GROWTH * self.mixed_steps[-1][0]) + GROWTH_TOKENS)
        while low < high:
            middle = (low + high + 1) // 2
            if seconds_at(points, middle) <= left:
                low = middle
            else:
                high = middle - 1
        return low
