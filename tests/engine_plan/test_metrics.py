"""Metrics: the names that dashboards know, and values that follow what happened."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.engine_plan.builders import Clock, Harness, config_of, params_of, request_of
from tests.engine_plan.grammars import HandCompiler, constrained
from tests.engine_plan.grammars import run as run_engines
from tests.engine_plan.sim import SimExecutor

from tandem.engine.core.engine_core import EngineCore
from tandem.engine.metrics import EngineMetrics, WeightedHistogram, token_buckets

LABELS = {"model_name": "tiny", "engine": "0"}

NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_by_source",
    "vllm:prompt_tokens_cached",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:admission_rejections",
    "vllm:cache_config_info",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_num_preemptions",
    "vllm:iteration_tokens_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:estimated_flops_per_gpu",
    "vllm:estimated_read_bytes_per_gpu",
    "vllm:estimated_write_bytes_per_gpu",
    "tandem:kv_blocks_held",
    "tandem:kv_blocks_free",
    "tandem:discarded_tokens",
    "tandem:late_connector_events",
    "tandem:resume_replayed_tokens",
    "tandem:spec_decode_num_draft_tokens",
    "tandem:spec_decode_num_accepted_tokens",
}


def engine_of(registry: CollectorRegistry, clock: Clock, num_blocks: int = 64, **flat):
    config = config_of(served_model_name="tiny", **flat)
    executor = SimExecutor(num_blocks)
    metrics = EngineMetrics(registry, model_name="tiny", max_model_len=1000)
    capacity = executor.start(config)
    return EngineCore(config, executor, capacity, metrics=metrics, clock=clock)


def run(core: EngineCore, clock: Clock) -> None:
    """Steps of 20 ms until nothing is left."""
    while core.has_work:
        core.step()
        clock.now += 0.02


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, LABELS | labels)


def test_names_are_those_that_dashboards_know():
    """Exactly these families, each with help."""
    registry = CollectorRegistry()
    engine_of(registry, Clock())

    families = list(registry.collect())

    assert {family.name for family in families} == NAMES
    assert all(family.documentation for family in families)


def test_counters_follow_the_requests():
    """Tokens by source, hits, ends by reason, sizes and times."""
    registry, clock = CollectorRegistry(), Clock()
    core = engine_of(registry, clock)
    prompt = [1] * 40
    params = params_of(max_tokens=5, ignore_eos=True)
    core.add(request_of("a", prompt, params=params))
    run(core, clock)
    core.add(request_of("b", prompt, params=params_of(max_tokens=5, ignore_eos=True, n=2)))
    core.add(request_of("c", params=params))
    run(core, clock)
    core.add(request_of("d", params=params))
    core.abort(core.keys()[0])
    core.step()

    assert value(registry, "vllm:prompt_tokens_total") == 100
    assert value(registry, "vllm:prefix_cache_queries_total") == 100
    assert value(registry, "vllm:prefix_cache_hits_total") == 32
    by_source = "vllm:prompt_tokens_by_source_total"
    assert value(registry, by_source, source="local_compute") == 68
    assert value(registry, by_source, source="local_cache_hit") == 32
    assert value(registry, by_source, source="external_kv_transfer") == 0
    assert value(registry, "vllm:generation_tokens_total") == 20
    assert value(registry, "vllm:request_success_total", finished_reason="length") == 3
    assert value(registry, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(registry, "vllm:time_to_first_token_seconds_count") == 3
    assert value(registry, "vllm:inter_token_latency_seconds_count") == 16
    assert value(registry, "vllm:inter_token_latency_seconds_bucket", le="0.025") == 16
    assert value(registry, "vllm:request_params_n_sum") == 5
    assert value(registry, "vllm:iteration_tokens_total_sum") == 68 + 16
    assert value(registry, "vllm:e2e_request_latency_seconds_count") == 4
    assert value(registry, "vllm:request_decode_time_seconds_count") == 3
    assert value(registry, "vllm:num_requests_running") == 0
    assert value(registry, "tandem:kv_blocks_free") == 64


def test_pressure_shows():
    """Preemptions, refusals, waiting requests and usage."""
    registry, clock = CollectorRegistry(), Clock()
    core = engine_of(registry, clock, 4, max_num_queued_reqs=2, max_num_queued_tokens=30)
    params = params_of(max_tokens=40, ignore_eos=True)
    assert core.add(request_of("a", 16, params=params)) is None
    assert core.add(request_of("x", 16)) is not None
    core.step()
    assert core.add(request_of("b", 15, params=params)) is None
    assert core.add(request_of("c", 15, params=params)) is None
    assert core.add(request_of("y", 1)) is not None
    core.step()
    assert value(registry, "vllm:num_requests_running") == 3
    assert value(registry, "vllm:kv_cache_usage_perc") == 1.0
    run(core, clock)

    reasons = ("max_num_queued_reqs", "max_num_queued_tokens")
    refused = [value(registry, "vllm:admission_rejections_total", reason=why) for why in reasons]
    assert refused == [1, 1]
    preemptions = value(registry, "vllm:num_preemptions_total")
    assert preemptions
    assert value(registry, "vllm:request_num_preemptions_sum") == preemptions


def test_the_cache_describes_itself():
    """One series with the cache's settings as labels."""
    registry = CollectorRegistry()
    engine_of(registry, Clock())

    text = generate_latest(registry).decode()

    (line,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    for label in ('block_size="16"', 'num_gpu_blocks="64"', 'kv_cache_size_tokens="1024"'):
        assert label in line
    assert line.endswith(" 1.0")


def test_histograms_take_many_at_once():
    """Equal observations count as often as they were; buckets are cumulative and end at +Inf."""
    registry = CollectorRegistry()
    histogram = WeightedHistogram("h", "Help.", labels={}, buckets=(1, 2), registry=registry)

    histogram.observe(1.0, 3)
    histogram.observe(1.5)
    histogram.observe(9.0, 2)

    buckets = [registry.get_sample_value("h_bucket", {"le": le}) for le in ("1.0", "2.0", "+Inf")]
    assert buckets == [3, 4, 6]
    assert registry.get_sample_value("h_sum") == 22.5
    assert registry.get_sample_value("h_count") == 6


def test_what_waits_for_a_grammar_waits_for_no_room():
    """It is deferred, as what waits for KV is; everybody who asks whether anything is here, or how
    much waits, hears of it."""
    registry, compiler = CollectorRegistry(), HandCompiler()
    compiler.held = "1 2"
    metrics = EngineMetrics(registry, model_name="tiny", max_model_len=1000)
    engine = Harness(gate=compiler.gate, metrics=metrics, max_num_seqs=1)
    engine.add(request_of("asks", params=constrained("1 2")))
    engine.add(request_of("runs"))
    engine.add(request_of("queues"))
    engine.step()
    engine.core.observe()

    by_reason = "vllm:num_requests_waiting_by_reason"
    assert value(registry, by_reason, reason="capacity") == 1
    assert value(registry, by_reason, reason="deferred") == 1
    assert value(registry, "vllm:num_requests_waiting") == 2
    assert engine.core.load_report().num_waiting == 2
    stats = engine.core.stats()
    assert (stats["running"], stats["waiting"], stats["gated"]) == (1, 1, 1)
    compiler.let_go.set()
    run_engines(engine)
    assert engine.core.stats()["gated"] == 0


def test_token_buckets_end_at_the_context():
    """1, 2, 5 times powers of ten."""
    assert token_buckets(60) == [1, 2, 5, 10, 20, 50]


@pytest.mark.full
def test_series_do_not_grow_with_requests():
    """Ten thousand requests leave the series that there were before the first."""
    registry, clock = CollectorRegistry(), Clock()
    core = engine_of(registry, clock, enable_prefix_caching=False)

    def names():
        return {
            (sample.name, *sorted(sample.labels.items()))
            for family in registry.collect()
            for sample in family.samples
        }

    before, params = names(), params_of(max_tokens=1, ignore_eos=True)
    for wave in range(200):
        for number in range(50):
            core.add(request_of(f"request-{wave}-{number}", 2, params=params))
        run(core, clock)

    assert value(registry, "vllm:request_success_total", finished_reason="length") == 10_000
    assert names() == before
    assert len(before) < 500
    print(f"series of an engine: {len(before)}")
