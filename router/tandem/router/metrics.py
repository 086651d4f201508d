"""Metrics of the router: vLLM's names if the meaning is the same, else names with ``tandem:``.

Labelled children are bound once. Gauges are read when they are scraped.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from enum import StrEnum
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.outputs import FinishReason


class TokenHistogram(Collector):
    """Histogram for one writing thread; scraped in any, maybe without its last observation."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]):
        """``bounds`` are upper, ascending, inclusive; one without end is added."""
        self.name = name
        self.documentation = text
        self.labels = labels
        self._bounds = bounds
        self._names = [*map(floatToGoString, bounds), "+Inf"]
        self._children: dict[tuple[str, ...], TokenTimes] = {}

    def child(self, *values: str) -> TokenTimes:
        """Return the observations under these label values."""
        return self._children.setdefault(values, TokenTimes(self._bounds))

    def totals(self) -> tuple[int, float]:
        """Return the number of observations and their sum over all labels."""
        children = list(self._children.values())
        return sum(sum(each.counts) for each in children), sum(each.sum for each in children)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.documentation, labels=self.labels)
        for values, child in list(self._children.items()):
            cumulative = accumulate(map(float, child.counts))
            buckets = list(zip(self._names, cumulative, strict=True))
            family.add_metric(values, buckets=buckets, sum_value=child.sum)
        yield family


class TokenTimes:
    """Observations under one set of labels."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Count of each bucket; the last has no upper bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class RejectReason(StrEnum):
    """Reasons to refuse a request; the first two are vLLM's."""

    REQUESTS = "max_num_queued_reqs"
    TOKENS = "max_num_queued_tokens"
    AGE = "max_queue_age"
    LARGE = "large_requests"
    """No thread was free for the work on a large request before it can be queued."""


_MODEL = ("model_name",)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LONG = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(
    float(step * 10**power)
    for power in range(6)
    for step in (1, 2, 5)
    if step * 10**power <= 200000
)
DROPS = ("garbage", "reset", "stale", "unexpected")
"""Reasons for dropping a worker's frame."""
SHAPES = ("whole", "handoff")
ATTEMPT_KINDS = ("first", "another_prefill", "local_prefill", "another_decode", "same")
"""Kinds of attempts, as ``AttemptKind``."""
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
STATUSES = (200, 429, 500, 503, 504)
"""Counted statuses of answers."""

MISTAKES = frozenset({RefusalCode.INVALID, RefusalCode.NEVER_FITS, RefusalCode.UNSUPPORTED})
"""Refusals of a client's mistakes (400)."""

GaugeReading = Mapping[tuple[str, ...], float]
GaugeReader = Callable[[], GaugeReading]


class Totals(NamedTuple):
    """Counters since the start. An output is the part of one choice in one step."""

    started: float
    ended: float
    failed: float
    prompt_tokens: float
    cached_tokens: float
    first_outputs: float
    first_output_seconds: float
    next_outputs: float
    next_output_seconds: float


class RouterMetrics:
    """All metrics under ``/metrics``. Used in the loop's thread."""

    next_token: Callable[[float], None]
    """Observes the seconds between two outputs of a choice."""

    def __init__(self, model_name: str = "") -> None:
        self.registry = CollectorRegistry()
        self._gauges: list[_ReadGauge] = []
        self._model_name = model_name
        self._requests()
        self._dispatch()
        self._bind()

    def serve(self, model_name: str) -> None:
        """Set the model's name in the labels."""
        if model_name != self._model_name:
            self._model_name = model_name
            self._bind()

    def gauge(self, name: str, text: str, labels: tuple[str, ...], read: GaugeReader) -> None:
        """Register a gauge that is read at each scrape; absent label values have no series."""
        gauge = _ReadGauge(name, text, labels, read)
        self.registry.register(gauge)
        self._gauges.append(gauge)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def reading(self) -> Callable[[], bytes]:
        """Read all gauges, and return the function that writes the exposition, for any thread."""
        return partial(self._written, {gauge.name: dict(gauge.read()) for gauge in self._gauges})

    def _written(self, readings: Mapping[str, GaugeReading]) -> bytes:
        _read_before.values = readings
        try:
            return generate_latest(self.registry)
        finally:
            del _read_before.values

    def totals(self) -> Totals:
        """Return the main counters' values. Not for each token."""
        next_outputs, next_output_seconds = self._h_itl.totals()
        return Totals(
            started=_sum(self._h_prompt, "_count"),
            ended=_sum(self._h_e2e, "_count"),
            failed=_sum(self._failures, "_total"),
            prompt_tokens=_sum(self._c_prompt, "_total"),
            cached_tokens=_sum(self._c_cached, "_total"),
            first_outputs=_sum(self._h_ttft, "_count"),
            first_output_seconds=_sum(self._h_ttft, "_sum"),
            next_outputs=next_outputs,
            next_output_seconds=next_output_seconds,
        )

    def rejections(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for reason, value in _samples(self._rejections, "_total", "reason"):
            if value:
                found[reason] = found.get(reason, 0) + int(value)
        return found

    # Requests, in vLLM's names.

    def request_came(self) -> None:
        self._came.inc()

    def request_started(self, *, num_prompt: int, num_choices: int, max_tokens: int | None) -> None:
        self._prompt_tokens.inc(num_prompt)
        self._request_prompt.observe(num_prompt)
        self._params_n.observe(num_choices)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

    def first_token(self, seconds: float) -> None:
        """Observe the time from arrival to the first token."""
        self._ttft.observe(seconds)

    def choice_finished(self, reason: FinishReason) -> None:
        self._success.labels(self._model_name, str(reason)).inc()

    def request_ended(
        self, *, seconds: float, num_tokens: int, num_choices: int, decode_seconds: float
    ) -> None:
        """Count a request that was answered, or whose client left.

        ``num_tokens`` is over all choices with output.
        """
        self._generation_tokens.inc(num_tokens)
        self._request_generation.observe(num_tokens)
        self._e2e.observe(seconds)
        if num_tokens > num_choices:
            self._tpot.observe(decode_seconds / (num_tokens / num_choices - 1))

    def cached_tokens(self, count: int) -> None:
        self._prompt_cached.inc(count)

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self._model_name, reason).inc()

    def too_large_now(self) -> None:
        """Count a request that was refused because no thread was free."""
        self.request_came()
        self.rejected(RejectReason.LARGE)

    def begin_answers(self, paths: Iterable[str]) -> None:
        """Create the counters of answers of these paths."""
        for path, status in product(paths, STATUSES):
            self._http.labels(path, str(status))

    def http_answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def hints_ignored(self, names: Iterable[str]) -> None:
        for name in names:
            self._hints.labels(name).inc()

    # Dispatch, ours.

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()

    def discovery_failed(self) -> None:
        self._discovery_failed.inc()

    def attempt(self, shape: str, attempt_kind: str) -> None:
        self._attempts.labels(shape, attempt_kind).inc()

    def forecast(self, way: str, error: float) -> None:
        """Observe the forecast's error of a first token, in seconds."""
        self._forecast_errors.labels(way).observe(error)

    def attempt_failed(self, kind: str, reason: str) -> None:
        """Count a refused or failed attempt, by its reason."""
        self._attempt_failures.labels(kind, reason).inc()

    def request_failed(self, reason: str) -> None:
        """Count a failed request, by its reason."""
        self._failures.labels(reason).inc()

    def request_cancelled(self) -> None:
        self._cancelled.inc()

    def first_token_from(self, role: str) -> None:
        """Count the role of the leg that sent token 1 first."""
        self._first_from.labels(role).inc()

    def repeated(self, count: int) -> None:
        """Count tokens that a second leg repeated."""
        self._repeated.inc(count)

    def contradicted(self) -> None:
        """Count two legs that disagreed on a token."""
        self._contradictions.inc()

    def _requests(self) -> None:
        self._h_ttft = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from arrival to the first token.",
            _TTFT,
        )
        name = "vllm:inter_token_latency_seconds"
        self._h_itl = TokenHistogram(name, "Time between two outputs of a choice.", _MODEL, _ITL)
        self.registry.register(self._h_itl)
        self._h_tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between a request's tokens after the first.",
            _ITL,
        )
        self._h_e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from a request's arrival to its end.", _LONG
        )
        self._h_prompt = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS
        )
        self._h_generation = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a request's answers.", _TOKENS
        )
        self._h_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of requests that have it.", _TOKENS
        )
        self._h_n = self._histogram("vllm:request_params_n", "Choices of a request (n).", _CHOICES)
        self._c_prompt = self._counter("vllm:prompt_tokens", "Prompt tokens.", _MODEL)
        self._c_cached = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were not computed.", _MODEL
        )
        self._c_generation = self._counter("vllm:generation_tokens", "Tokens emitted.", _MODEL)
        self._success = self._counter(
            "vllm:request_success",
            "Finished choices, by finish reason.",
            (*_MODEL, "finished_reason"),
        )
        self._rejections = self._counter(
            "vllm:admission_rejections",
            "Requests rejected by a full queue, or by age.",
            (*_MODEL, "reason"),
        )
        self._http = self._counter(
            "http_requests", "Answers by path and status.", ("handler", "status")
        )

    def _dispatch(self) -> None:
        self._hints = self._counter(
            "tandem:router_hints_ignored",
            "Fields of requests without effect, by name (docs/reference/parameters.md).",
            ("hint",),
        )
        self._dropped = self._counter(
            "tandem:router_frames_dropped", "Frames of workers without a request.", ("reason",)
        )
        self._discovery_failed = self._counter(
            "tandem:router_discovery_failures", "Failed lists or watches of pods."
        )
        self._forecast_errors = Histogram(
            "tandem:router_forecast_error_seconds",
            "Difference between predicted and measured times to the first token, by way.",
            ("way",),
            registry=self.registry,
            buckets=_TTFT,
        )
        self._attempts = self._counter(
            "tandem:router_attempts",
            "Attempts of requests, by shape and kind.",
            ("shape", "kind"),
        )
        self._attempt_failures = self._counter(
            "tandem:router_attempt_failures", "Failed attempts of requests.", ("kind", "reason")
        )
        self._came = self._counter(
            "tandem:router_requests", "Requests for answers, including rejected ones."
        )
        self._failures = self._counter(
            "tandem:router_request_failures", "Requests without an answer.", ("reason",)
        )
        self._first_from = self._counter(
            "tandem:router_first_token", "Leg that sent token 1 first.", ("source",)
        )
        self._cancelled = self._counter(
            "tandem:router_requests_cancelled", "Requests whose client disconnected."
        )
        self._repeated = self._counter(
            "tandem:router_tokens_repeated", "Equal tokens that both legs sent."
        )
        self._contradictions = self._counter(
            "tandem:router_contradictions",
            "Requests that failed because two workers computed different tokens.",
        )

    def _bind(self) -> None:
        name = self._model_name
        # A series that begins at 1 has no increase, so it begins at 0.
        for cause in FailCause:
            self._failures.labels(str(cause))
            self._attempt_failures.labels("failed", str(cause))
        for code in RefusalCode:
            if code not in MISTAKES:
                self._failures.labels(str(code))
            self._attempt_failures.labels("refused", str(code))
        for shape, attempt_kind in product(SHAPES, ATTEMPT_KINDS):
            self._attempts.labels(shape, attempt_kind)
        for reason in DROPS:
            self._dropped.labels(reason)
        for role in WorkerRole:
            self._first_from.labels(str(role))
        if name:
            for reason in RejectReason:
                self._rejections.labels(name, str(reason))
            for finish in FinishReason:
                self._success.labels(name, str(finish))
        self._ttft = self._h_ttft.labels(name)
        self.next_token = self._h_itl.child(name).observe
        self._tpot = self._h_tpot.labels(name)
        self._e2e = self._h_e2e.labels(name)
        self._request_prompt = self._h_prompt.labels(name)
        self._request_generation = self._h_generation.labels(name)
        self._params_max_tokens = self._h_max_tokens.labels(name)
        self._params_n = self._h_n.labels(name)
        self._prompt_tokens = self._c_prompt.labels(name)
        self._prompt_cached = self._c_cached.labels(name)
        self._generation_tokens = self._c_generation.labels(name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _MODEL, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)


def _samples(metric: Counter | Histogram, ending: str, label: str) -> Iterator[tuple[str, float]]:
    """Yield the values of the samples whose names have this ending, with the value of one label."""
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith(ending):
                yield sample.labels.get(label, ""), sample.value


def _sum(metric: Counter | Histogram, ending: str) -> float:
    return sum(value for _, value in _samples(metric, ending, ""))


_read_before = threading.local()
"""Values of gauges for an exposition that this thread writes."""


class _ReadGauge(Collector):
    """Gauge that reads its values at a scrape, so ended objects leave no series.

    In other threads it shows the values that the loop's thread has read.
    """

    kind = "gauge"

    def __init__(self, name: str, text: str, labels: tuple[str, ...], read: GaugeReader) -> None:
        self.name = name
        self.documentation = text
        self.labels = labels
        self.read = read

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self.name, self.documentation, labels=self.labels)
        before: Mapping[str, GaugeReading] | None = getattr(_read_before, "values", None)
        values = self.read() if before is None else before[self.name]
        for labels, value in values.items():
            family.add_metric(labels, value)
        yield family


def only(value: float) -> dict[tuple[str, ...], float]:
    """Return the reading of a gauge without labels."""
    return {(): value}
