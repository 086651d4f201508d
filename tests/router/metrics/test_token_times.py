"""The histogram of times between tokens says what the library's would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tandem.router.metrics import RouterMetrics, TokenHistogram

BOUNDS = (0.01, 0.5, 20.0)


def test_it_is_scraped_as_the_librarys_is() -> None:
    """Bounds are inclusive, buckets add up, the last has no bound."""
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    library = Histogram("seconds", "Text.", ("model",), buckets=BOUNDS, registry=theirs)
    histogram = TokenHistogram("seconds", "Text.", ("model",), BOUNDS)
    ours.register(histogram)
    for value in (0.0, 0.01, 0.010001, 0.5, 3.0, 20.0, 21.0):
        library.labels("m").observe(value)
        histogram.child("m").observe(value)
    told = [line for line in generate_latest(theirs).decode().splitlines() if "created" not in line]
    assert generate_latest(ours).decode().splitlines() == told
    assert histogram.totals() == (7, 44.520001)


def test_a_renamed_model_goes_on_under_its_name() -> None:
    metrics = RouterMetrics("first")
    metrics.next_token(0.02)
    metrics.serve("second")
    metrics.next_token(0.02)
    metrics.next_token(0.02)
    text = metrics.text().decode()
    assert 'vllm:inter_token_latency_seconds_count{model_name="first"} 1.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="second"} 2.0' in text
    assert metrics.totals().next_outputs == 3
