"""The answer to a pooled request: whole, from one worker, once."""

from __future__ import annotations

from tandem.protocol.errors import FailCause
from tandem.protocol.outputs import PooledOutput
from tandem.router.dispatch.attempt import Attempt, Leg
from tandem.router.dispatch.failure import AttemptFailure
from tandem.router.dispatch.job import Job


def take_pooled(
    job: Job, attempt: Attempt, leg: Leg, output: PooledOutput
) -> AttemptFailure | None:
    """Mark the job as answered, or return the attempt's failure."""
    if job.request.pooling is None:
        return attempt.failure(leg, FailCause.INTERNAL, "a vector, not tokens")
    if not output.values or len(output.values) % 4:
        count = len(output.values)
        return attempt.failure(leg, FailCause.INTERNAL, f"{count} bytes that are no float32 values")
    attempt.heard(leg)
    job.ledger.answered()
    return None
