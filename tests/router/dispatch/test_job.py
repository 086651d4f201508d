"""A job and its attempt: block hashes, and what counts as silence."""

from __future__ import annotations

import asyncio

import pytest
from tests.router.builders import inc, make_request

from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.outputs import Accepted
from tandem.router.dispatch.attempt import Attempt, Leg
from tandem.router.dispatch.job import Job
from tandem.router.metrics import RouterMetrics
from tandem.router.placement.policy import Placement


def test_hashes_of_the_caller_are_used_if_they_fit() -> None:
    """A chain of the right root is taken as it is; of another, made anew."""
    request = make_request(64)
    root = root_hash(fingerprint="f", block_size=16)
    right = tuple(hash_blocks(root, request.prompt_token_ids, 16))
    given = type(request)(
        key=request.key,
        prompt_token_ids=request.prompt_token_ids,
        params=request.params,
        block_hashes=right,
    )
    job = Job(given, name="1", deadline=1.0, max_attempts=3, metrics=RouterMetrics())

    assert job.prompt.of("f", 16) is right
    assert job.prompt.of("f", 16) is right
    assert job.prompt.of("g", 16) != right
    assert len(job.prompt.of("g", 16)) == 4
    assert (
        Job(request, name="2", deadline=1.0, max_attempts=3, metrics=RouterMetrics()).prompt.of(
            "f", 16
        )
        == right
    )
    assert inc(1) != inc(2)


async def test_a_slow_client_is_no_silent_worker() -> None:
    """Events that wait to be read count as said."""
    attempt = Attempt(0, Placement(inc(1), None, ""), asyncio.get_running_loop())
    leg = Leg(attempt, None, is_prefill=False)  # type: ignore[arg-type]  # no worker is needed
    attempt.legs.append(leg)
    late = attempt.started_at + 100

    leg.receive(Accepted("1", 0))
    assert attempt.overdue(late, accept=1.0, progress=1.0) is None


@pytest.mark.parametrize(
    ("n", "logprobs", "whole"),
    [(1, None, False), (4, 20, False), (1, 40_000, True), (128, 1000, True), (1, -1, True)],
)
def test_first_tokens_that_are_too_long_to_be_handed_over_stay_on_one_worker(
    n: int, logprobs: int | None, whole: bool
) -> None:
    """A message between workers is bounded, and their link ends by a longer one."""
    request = make_request(n=n, logprobs=logprobs)
    job = Job(request, name="1", deadline=1.0, max_attempts=3, metrics=RouterMetrics())
    assert job.facts({}).whole == whole
