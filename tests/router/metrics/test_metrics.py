"""What the router counts, and under which name."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tandem.llm.cpu_pool import IN_LOOP
from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import FailCause, RefusalCode, RequestRefused
from tandem.protocol.outputs import FinishReason
from tandem.router.app import Router
from tandem.router.config import RouterConfig
from tandem.router.dispatch.retry_policy import AttemptKind
from tandem.router.metrics import (
    ATTEMPT_KINDS,
    DROPS,
    MISTAKES,
    SHAPES,
    RejectReason,
    RouterMetrics,
)


def test_metrics_of_another_name() -> None:
    """The model's name may become known later; nothing is counted under both."""
    metrics = RouterMetrics()
    metrics.serve("m")
    metrics.serve("m")
    metrics.first_token(0.1)

    assert b'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0' in metrics.text()


def test_answers_begin_at_nothing() -> None:
    """Who adds up increases, as load tools do, sees the first answer as well as those after it."""
    metrics = RouterMetrics()
    assert "vllm:request_success_total{" not in metrics.text().decode()
    metrics.serve("m")
    text = metrics.text().decode()
    for finish in FinishReason:
        line = f'vllm:request_success_total{{finished_reason="{finish}",model_name="m"}} 0.0'
        assert line in text
    for role in WorkerRole:
        assert f'tandem:router_first_token_total{{source="{role}"}} 0.0' in text


def test_failures_begin_at_nothing() -> None:
    """Of a series that begins at 1 Prometheus sees no increase: the first failure would be lost."""
    metrics = RouterMetrics("m")
    text = metrics.text().decode()
    for cause in FailCause:
        assert f'tandem:router_request_failures_total{{reason="{cause}"}} 0.0' in text
        line = f'tandem:router_attempt_failures_total{{kind="failed",reason="{cause}"}} 0.0'
        assert line in text
    for code in set(RefusalCode) - MISTAKES:
        assert f'tandem:router_request_failures_total{{reason="{code}"}} 0.0' in text
    assert "tandem:router_requests_total 0.0" in text
    for code in RefusalCode:
        line = f'tandem:router_attempt_failures_total{{kind="refused",reason="{code}"}} 0.0'
        assert line in text
    for drop in DROPS:
        assert f'tandem:router_frames_dropped_total{{reason="{drop}"}} 0.0' in text
    assert set(ATTEMPT_KINDS) == set(AttemptKind)
    for shape, attempt_kind in product(SHAPES, ATTEMPT_KINDS):
        assert f'tandem:router_attempts_total{{kind="{attempt_kind}",shape="{shape}"}} 0.0' in text
    for reason in RejectReason:
        line = f'vllm:admission_rejections_total{{model_name="m",reason="{reason}"}} 0.0'
        assert line in text
    assert metrics.rejections() == {}
    metrics.rejected(RejectReason.AGE)
    assert metrics.rejections() == {"max_queue_age": 1}


async def test_a_large_request_that_finds_no_thread_is_a_rejection(small_model: Path) -> None:
    """It ends before it is dispatched, and is counted by its reason all the same."""
    router = Router.of(RouterConfig(model=str(small_model), served_model_name=("m",)))
    async with router.running():
        cpu_pool = router.llm.cpu_pool
        cpu_pool._wait_seconds = 0.0
        while cpu_pool._num_free:
            await cpu_pool._turn("", IN_LOOP, is_large=False)
        with pytest.raises(RequestRefused, match="busy with large requests"):
            await router.llm.encode("x" * IN_LOOP)

    assert router.metrics.rejections() == {"large_requests": 1}
    assert "tandem:router_requests_total 1.0" in router.metrics.text().decode()
