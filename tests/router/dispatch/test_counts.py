"""What is counted of requests that end before a worker has them, and as what."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs
from tests.router.behaviours import ANSWER, Make, keep_quiet, refuse_with
from tests.router.builders import LIMITS, Stack, beats, make_request, tokens_of
from tests.waiting import until

from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.protocol.outputs import EngineCoreOutput
from tandem.router.dispatch.admission import AdmissionQueue, AdmissionRefused
from tandem.router.dispatch.explain import Stopwatch
from tandem.router.dispatch.retry_policy import ReaderTooSlow
from tandem.router.http.errors import answer_of
from tandem.router.metrics import MISTAKES, RouterMetrics

FAILURES = "tandem:router_request_failures_total"
REFUSAL = Refusal(code=RefusalCode.INVALID, message="no")


def failures(stack: Stack) -> dict[str, float]:
    reasons = [str(each) for each in (*FailCause, *RefusalCode)]
    found = {reason: stack.metric(FAILURES, reason=reason) for reason in reasons}
    return {reason: count for reason, count in found.items() if count}


def admitted(stack: Stack) -> float:
    return stack.metric("vllm:request_prompt_tokens_count", model_name="fake")


def came(stack: Stack) -> float:
    return stack.metric("tandem:router_requests_total")


async def test_who_finds_the_queue_full_is_no_prompt(stack: Stack, decode: Make) -> None:
    """It is turned away, and that is counted once; nor is who leaves while it waits."""
    limits = replace(LIMITS, max_inflight_requests=1, max_queued_requests=1)
    stack.dispatcher.admission = AdmissionQueue(limits, stack.metrics)
    await stack.find(decode(behaviour=keep_quiet))
    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: admitted(stack) == 1)
    waiting = asyncio.create_task(stack.run(make_request()))
    await until(lambda: stack.dispatcher.admission.num_waiting == 1)

    with pytest.raises(AdmissionRefused):
        await stack.run(make_request())

    assert (came(stack), admitted(stack), failures(stack)) == (3, 1, {})
    reason = {"model_name": "fake", "reason": "max_num_queued_reqs"}
    assert stack.metric("vllm:admission_rejections_total", **reason) == 1
    for task in (waiting, running):
        task.cancel()
    await asyncio.gather(waiting, running, return_exceptions=True)
    assert (came(stack), admitted(stack), failures(stack)) == (3, 1, {})


async def test_a_service_that_nobody_serves_fails_requests(stack: Stack) -> None:
    """Also where what is served is not known: that is asked before a prompt can be made."""
    with pytest.raises(RequestFailed, match="no decode worker is connected"):
        await stack.dispatcher.describe()
    assert (came(stack), admitted(stack), failures(stack)) == (1, 0, {"worker_lost": 1})

    with pytest.raises(RequestFailed):
        await stack.run(make_request())
    assert (came(stack), failures(stack)) == (2, {"worker_lost": 2})


async def test_a_fleet_that_sleeps_fails_requests(stack: Stack, decode: Make) -> None:
    """A refusal that is answered with 503 is a request without an answer."""
    worker = decode()
    await stack.find(worker)
    worker.load = structs.replace(worker.load, sleeping=True)
    await beats(stack, worker)
    with pytest.raises(RequestRefused, match="asleep"):
        await stack.run(make_request())
    assert (came(stack), failures(stack)) == (1, {"asleep": 1})


@pytest.mark.parametrize("code", [RefusalCode.CAPACITY, RefusalCode.INVALID])
async def test_a_refusal_is_a_failure_where_the_client_is_not_at_fault(
    stack: Stack, decode: Make, code: RefusalCode
) -> None:
    """Workers that are full are the service's fault; a wrong request is its client's."""
    await stack.find(decode(behaviour=refuse_with(code)))
    with pytest.raises(RequestRefused):
        await stack.run(make_request())
    expected = {} if code in MISTAKES else {str(code): 1.0}
    assert (came(stack), failures(stack)) == (1, expected)


LATE = DeadlinePassed(FailCause.TIMEOUT, "late")


@pytest.mark.parametrize(
    ("error", "takes_partial", "speaks", "failed", "cancelled"),
    [
        (ReaderTooSlow(FailCause.CAPACITY, "unread"), False, True, {}, 1),
        (LATE, True, True, {}, 0),
        (LATE, True, False, {"timeout": 1.0}, 0),
        (LATE, False, True, {"timeout": 1.0}, 0),
    ],
)
async def test_who_reads_nothing_or_takes_a_part_is_no_failure(
    stack: Stack,
    error: RequestFailed,
    takes_partial: bool,
    speaks: bool,
    failed: dict[str, float],
    cancelled: int,
) -> None:
    """No service could have answered better; a deadline without an answer is one."""
    watch = Stopwatch(stack.metrics, 5.0, takes_partial=takes_partial)
    if speaks:
        watch.output(EngineCoreOutput("a", 0, 0, 0, (7,)), 6.0)
    watch.failed(error)
    assert failures(stack) == failed
    assert stack.metric("tandem:router_requests_cancelled_total") == cancelled


def test_failures_are_what_is_answered_with_503() -> None:
    statuses = {
        code: answer_of(RequestRefused(structs.replace(REFUSAL, code=code))).status
        for code in RefusalCode
    }
    assert {code for code, status in statuses.items() if status == 400} == MISTAKES
    assert set(statuses.values()) == {400, 503}


@pytest.mark.parametrize("num_choices", [1, 4])
def test_time_for_a_token_is_that_of_one_choice(num_choices: int) -> None:
    """Choices come beside each other: a client waits no less for each of them."""
    metrics = RouterMetrics("fake")
    watch = Stopwatch(metrics, 5.0)
    for position in range(11):
        for choice in range(num_choices):
            output = EngineCoreOutput("a", 0, choice, position, (7,))
            watch.output(output, 6.0 + position / 10)
    watch.end(8.0)
    name, labels = "vllm:request_time_per_output_token_seconds", {"model_name": "fake"}
    assert metrics.registry.get_sample_value(f"{name}_sum", labels) == pytest.approx(0.1)
    assert metrics.registry.get_sample_value(f"{name}_count", labels) == 1


async def test_an_answer_is_no_failure(stack: Stack, decode: Make) -> None:
    """It comes, it is admitted, and nothing failed."""
    await stack.find(decode())
    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert (came(stack), admitted(stack), failures(stack)) == (1, 1, {})
