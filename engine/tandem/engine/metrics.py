"""Metrics of an engine, under vLLM's names if the meaning is the same, else ``tandem:``.

Observed once a step from ``StepStats``, never per token.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Metric,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tandem.engine.config import CacheConfig
from tandem.engine.offload.connector import OffloadConnector
from tandem.engine.scheduler.stats import FinishedRecord, SchedulerStats, StepStats


class WeightedHistogram(Collector):
    """One series of one histogram with fixed labels."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """``buckets`` are upper bounds, growing, without the infinite one."""
        self.name = name
        self.documentation = documentation
        self.labels = dict(labels)
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), tuple(self._counts), strict=True):
            total += count
            buckets.append((_bound_text(bound), total))
        family = HistogramMetricFamily(self.name, self.documentation, labels=tuple(self.labels))
        family.add_metric(tuple(self.labels.values()), buckets, self._sum)
        yield family


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))


_Reading = Callable[[], Mapping[tuple[str, ...], float]]
"""Values by the additional labels."""


def register(registry: CollectorRegistry, tier: OffloadConnector, own: Mapping[str, str]) -> None:
    """Register the metrics of ``tier``; ``own`` are labels of each series."""
    stats = tier.stats

    def moved() -> Mapping[tuple[str, ...], float]:
        blocks = {("GPU_to_CPU",): stats.num_stored, ("CPU_to_GPU",): stats.num_loaded}
        return {way: count * stats.block_bytes for way, count in blocks.items()}

    def series(name: str, text: str, read: Callable[[], float], *, gauge: bool = False) -> None:
        registry.register(_Series(name, text, own, (), lambda: {(): read()}, gauge=gauge))

    name = "vllm:kv_offload_total_bytes"
    text = "KV bytes copied between the cache and host memory."
    registry.register(_Series(name, text, own, ("transfer_type",), moved))
    series(
        "vllm:kv_offload_cpu_cache_usage_perc",
        "Share of host memory's KV blocks that are cached, 0 to 1.",
        lambda: tier.num_cached / tier.num_blocks,
        gauge=True,
    )
    series(
        "vllm:kv_offload_stores_skipped",
        "Blocks not stored because all host blocks were being read.",
        lambda: stats.num_declined,
    )
    series(
        "tandem:kv_offload_hit_tokens",
        "Tokens whose KV was loaded from host memory.",
        lambda: stats.hit_tokens,
    )
    series(
        "tandem:kv_offload_evicted_blocks",
        "Blocks evicted from host memory.",
        lambda: stats.num_evicted,
    )
    series(
        "tandem:kv_offload_failed_loads",
        "Failed loads from host memory; their prompts were computed.",
        lambda: stats.num_failed_loads,
    )


class _Series(Collector):
    """One family that is read at a scrape."""

    def __init__(
        self,
        name: str,
        documentation: str,
        own: Mapping[str, str],
        labels: tuple[str, ...],
        read: _Reading,
        *,
        gauge: bool = False,
    ) -> None:
        self.name, self.documentation = name, documentation
        self.labels = (*own, *labels)
        self.kind = "gauge" if gauge else "counter"
        self._own = tuple(own.values())
        self._read = read

    def collect(self) -> Iterator[Metric]:
        make = GaugeMetricFamily if self.kind == "gauge" else CounterMetricFamily
        family = make(self.name, self.documentation, labels=self.labels)
        for values, number in self._read().items():
            family.add_metric((*self._own, *values), number)
        yield family


class Peak(NamedTuple):
    """Peak rates of one device."""

    flops: float
    bytes_per_s: float


_PEAKS = (
    ("B200", Peak(2.25e15, 8.0e12)),
    ("H200", Peak(989e12, 4.8e12)),
    ("GH200", Peak(989e12, 4.0e12)),
    ("H100 NVL", Peak(835e12, 3.9e12)),
    ("H100 PCIe", Peak(756e12, 2.0e12)),
    ("H100", Peak(989e12, 3.35e12)),
    ("H20", Peak(148e12, 4.0e12)),
    ("A100-SXM4-80GB", Peak(312e12, 2.039e12)),
    ("A100-SXM4-40GB", Peak(312e12, 1.555e12)),
    ("A100 80GB PCIe", Peak(312e12, 1.935e12)),
    ("L40S", Peak(362e12, 0.864e12)),
    ("L4", Peak(121e12, 0.3e12)),
)
"""Peaks by a whole word of the driver's name of the device."""


def peak_of(device_name: str) -> Peak | None:
    """Return the peak of a device by the driver's name; None for an unknown one, or a CPU."""
    words = f" {device_name} "
    longest = sorted(_PEAKS, key=lambda entry: -len(entry[0]))
    return next((peak for name, peak in longest if f" {name} " in words), None)


_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAPS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_SPANS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REASONS = ("stop", "length", "abort", "error", "handed_over")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def token_buckets(longest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, … up to ``longest``."""
    buckets: list[float] = []
    scale = 1
    while scale <= longest:
        buckets += [scale * step for step in (1, 2, 5) if scale * step <= longest]
        scale *= 10
    return buckets


class EngineMetrics:
    """Metrics of one engine; call ``observe`` after each step."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_name: str,
        max_model_len: int,
        engine: str = "0",
    ) -> None:
        """``max_model_len`` bounds the buckets of token counts."""
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": engine}
        self._running = self._gauge("vllm:num_requests_running", "Sequences in the batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Waiting sequences.")
        by_reason = "Waiting sequences, by reason."
        name = "vllm:num_requests_waiting_by_reason"
        self._by_reason = self._gauges(name, by_reason, "reason", ("capacity", "deferred"))
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._held = self._gauge("tandem:kv_blocks_held", "Blocks reserved for peers.")
        self._free = self._gauge("tandem:kv_blocks_free", "Unused blocks.")
        self._make_counters()
        self._make_histograms(token_buckets(max_model_len))

    def set_cache_info(self, config: CacheConfig, num_blocks: int, block_size: int) -> None:
        facts = {
            **dataclasses.asdict(config),
            "block_size": block_size,
            "num_gpu_blocks": num_blocks,
            "kv_cache_size_tokens": num_blocks * block_size,
        }
        labels = {**{name: str(value) for name, value in facts.items()}, **self._labels}
        labels.pop("model_name")
        info = Gauge(
            "vllm:cache_config_info",
            "Settings of the KV cache.",
            tuple(labels),
            registry=self._registry,
        )
        info.labels(**labels).set(1)

    def set_device(self, name: str) -> None:
        """Set the peak rates of the device's data sheet. An unknown device has no series."""
        known = peak_of(name)
        if known is None:
            return
        text = "Peak 16-bit operations per second of the device, by its data sheet."
        self._gauge("tandem:device_peak_flops_per_second", text).set(known.flops)
        text = "Peak memory bandwidth of the device in bytes per second, by its data sheet."
        self._gauge("tandem:device_peak_bytes_per_second", text).set(known.bytes_per_s)

    def show_offload(self, tier: OffloadConnector) -> None:
        register(self._registry, tier, self._labels)

    def observe(self, stats: StepStats, now: SchedulerStats) -> None:
        self._observe_gauges(now)
        self._observe_tokens(stats)
        for seconds in stats.first_token_times:
            self._ttft.observe(seconds)
        for gap, count in stats.token_gaps.items():
            self._gap.observe(gap, count)
        for record in stats.finished:
            self._observe_finished(record)

    def _observe_gauges(self, now: SchedulerStats) -> None:
        self._running.set(now.running)
        self._waiting.set(now.waiting + now.deferred)
        self._by_reason["capacity"].set(now.waiting)
        self._by_reason["deferred"].set(now.deferred)
        self._usage.set(now.cache_usage)
        self._free.set(now.free_blocks)
        self._held.set(now.held_blocks)

    def _observe_tokens(self, stats: StepStats) -> None:
        if stats.queried_tokens:
            self._queries.inc(stats.queried_tokens)
            self._hits.inc(stats.hit_tokens)
            self._prompt.inc(stats.prompt_tokens)
            self._cached.inc(stats.hit_tokens + stats.external_tokens)
            sources = (stats.computed_tokens, stats.hit_tokens, stats.external_tokens)
            for source, tokens in zip(_SOURCES, sources, strict=True):
                self._by_source[source].inc(tokens)
        if stats.generated_tokens:
            self._generated.inc(stats.generated_tokens)
        if stats.planned_tokens:
            self._iteration.observe(stats.planned_tokens)
        if stats.flops:
            self._flops.inc(stats.flops)
            self._read_bytes.inc(stats.read_bytes)
            self._write_bytes.inc(stats.write_bytes)
        if stats.replayed_tokens:
            self._replayed["true"].inc(stats.agreed_tokens)
            self._replayed["false"].inc(stats.replayed_tokens - stats.agreed_tokens)
        for counter, count in (
            (self._preemptions, stats.preemptions),
            (self._discarded, stats.discarded_tokens),
            (self._drafted, stats.draft_tokens),
            (self._accepted, stats.accepted_tokens),
            (self._late, stats.late_events),
        ):
            if count:
                counter.inc(count)
        for reason, count in (
            ("max_num_queued_reqs", stats.refused_queue_reqs),
            ("max_num_queued_tokens", stats.refused_queue_tokens),
        ):
            if count:
                self._rejections[reason].inc(count)

    def _observe_finished(self, record: FinishedRecord) -> None:
        self._success[record.reason].inc()
        self._e2e.observe(record.end_to_end)
        for histogram, seconds in (
            (self._queue, record.queue),
            (self._prefill, record.prefill),
            (self._decode, record.decode),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if record.queue is not None:
            self._inference.observe(record.end_to_end - record.queue)
        if record.decode is not None and record.num_generated > record.n:
            steps = record.num_generated / record.n - 1
            self._per_token.observe(record.decode / steps)
        self._prompt_sizes.observe(record.num_prompt)
        self._output_sizes.observe(record.num_generated)
        self._computed_sizes.observe(record.num_computed_prompt)
        self._n.observe(record.n)
        self._request_preemptions.observe(record.num_preemptions)
        if record.max_tokens is not None:
            self._max_tokens.observe(record.max_tokens)

    def _make_counters(self) -> None:
        counter, counters = self._counter, self._counters
        self._queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens found in the cache.")
        self._preemptions = counter("vllm:num_preemptions", "Preempted sequences.")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that began.")
        text = "Prompt tokens, by the source of their KV."
        name = "vllm:prompt_tokens_by_source"
        self._by_source = counters(name, text, "source", _SOURCES)
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens not computed here.")
        self._generated = counter("vllm:generation_tokens", "Tokens generated.")
        text = "Finished requests, by finish reason."
        self._success = counters("vllm:request_success", text, "finished_reason", _REASONS)
        reasons = ("max_num_queued_reqs", "max_num_queued_tokens")
        text = "Requests refused at the queue."
        self._rejections = counters("vllm:admission_rejections", text, "reason", reasons)
        text = "Estimated operations of steps on one device."
        self._flops = counter("vllm:estimated_flops_per_gpu", text)
        text = "Estimated bytes of weights and KV that steps read on one device."
        self._read_bytes = counter("vllm:estimated_read_bytes_per_gpu", text)
        text = "Estimated bytes of KV that steps wrote on one device."
        self._write_bytes = counter("vllm:estimated_write_bytes_per_gpu", text)
        text = "Tokens sampled for sequences that had already ended."
        self._discarded = counter("tandem:discarded_tokens", text)
        text = "Tokens sampled again on resume, by whether they were equal."
        name = "tandem:resume_replayed_tokens"
        self._replayed = counters(name, text, "agreed", ("true", "false"))
        name = "tandem:spec_decode_num_draft_tokens"
        self._drafted = counter(name, "Proposed tokens that a step checked.")
        name = "tandem:spec_decode_num_accepted_tokens"
        self._accepted = counter(name, "Proposed tokens that were sampled equal.")
        text = "Events of the hand-off for requests that have ended."
        self._late = counter("tandem:late_connector_events", text)

    def _make_histograms(self, sizes: list[float]) -> None:
        make = self._histogram
        self._ttft = make("vllm:time_to_first_token_seconds", "Time to the first token.", _TTFT)
        self._gap = make("vllm:inter_token_latency_seconds", "Time between two tokens.", _GAPS)
        name = "vllm:request_time_per_output_token_seconds"
        self._per_token = make(name, "Mean time between a request's tokens after the first.", _GAPS)
        self._e2e = make("vllm:e2e_request_latency_seconds", "Time from arrival to end.", _SPANS)
        self._queue = make(
            "vllm:request_queue_time_seconds", "Time from arrival to the first step.", _SPANS
        )
        name = "vllm:request_inference_time_seconds"
        self._inference = make(name, "Time from the first step to the end.", _SPANS)
        name = "vllm:request_prefill_time_seconds"
        self._prefill = make(name, "Time from the first step to the first token.", _SPANS)
        self._decode = make(
            "vllm:request_decode_time_seconds", "Time from the first token to the end.", _SPANS
        )
        self._iteration = make("vllm:iteration_tokens_total", "Tokens in a step.", _ITERATION)
        self._prompt_sizes = make("vllm:request_prompt_tokens", "Prompt tokens.", sizes)
        self._output_sizes = make("vllm:request_generation_tokens", "Output tokens.", sizes)
        name = "vllm:request_prefill_kv_computed_tokens"
        self._computed_sizes = make(name, "Prompt tokens computed.", sizes)
        self._max_tokens = make("vllm:request_params_max_tokens", "max_tokens.", sizes)
        self._n = make("vllm:request_params_n", "Choices of a request (n).", (1, 2, 5, 10, 20))
        buckets = (1, 2, 3, 4, 5, 10, 20)
        name = "vllm:request_num_preemptions"
        self._request_preemptions = make(name, "Preemptions of a request.", buckets)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(name, text, tuple(self._labels), registry=self._registry)
        return gauge.labels(**self._labels)

    def _gauges(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Gauge]:
        gauge = Gauge(name, text, (*self._labels, label), registry=self._registry)
        return {value: gauge.labels(**self._labels, **{label: value}) for value in values}

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, tuple(self._labels), registry=self._registry)
        return counter.labels(**self._labels)

    def _counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        counter = Counter(name, text, (*self._labels, label), registry=self._registry)
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> WeightedHistogram:
        return WeightedHistogram(
            name, text, labels=self._labels, buckets=buckets, registry=self._registry
        )
