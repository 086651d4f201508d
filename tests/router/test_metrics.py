"""What the router counts, and under which name."""

from __future__ import annotations

from tandem.protocol.errors import FailCause
from tandem.router.admission.queue import RejectReason
from tandem.router.metrics import RouterMetrics


def test_metrics_of_another_name() -> None:
    """The model's name may become known later; nothing is counted under both."""
    metrics = RouterMetrics()
    metrics.serve("m")
    metrics.serve("m")
    metrics.first_token(0.1)

    assert b'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0' in metrics.text()


def test_failures_begin_at_nothing() -> None:
    """Of a series that begins at 1 Prometheus sees no increase: the first failure would be lost."""
    metrics = RouterMetrics("m")
    text = metrics.text().decode()
    for cause in FailCause:
        assert f'tandem:router_request_failures_total{{reason="{cause}"}} 0.0' in text
    for reason in RejectReason:
        line = f'vllm:admission_rejections_total{{model_name="m",reason="{reason}"}} 0.0'
        assert line in text
    assert metrics.rejections() == {}
    metrics.rejected(RejectReason.AGE)
    assert metrics.rejections() == {"max_queue_age": 1}
