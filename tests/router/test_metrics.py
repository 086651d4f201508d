"""What the router counts, and under which name."""

from __future__ import annotations

from tandem.router.metrics import RouterMetrics


def test_metrics_of_another_name() -> None:
    """The model's name may become known later; nothing is counted under both."""
    metrics = RouterMetrics()
    metrics.serve("m")
    metrics.serve("m")
    metrics.first_token(0.1)

    assert b'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0' in metrics.text()
