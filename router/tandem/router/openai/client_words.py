"""The messages to clients for refusals and failures within the fleet.

Workers' messages name blocks, quotas, links and each other's addresses. The log and the metrics
have all of it. A client cannot use it and must not see it.
"""

from __future__ import annotations

from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
)
from tandem.router.dispatch.failure import FailedClosed, ReaderTooSlow

_AGAIN = "no worker could take the request; try again"
_REFUSED = {
    RefusalCode.CAPACITY: "the server is at its capacity; try again",
    RefusalCode.DRAINING: "the part of the server that would answer is on its way out; try again",
    RefusalCode.ASLEEP: "the server sleeps; it answers when its administrator has woken it up",
    RefusalCode.EXPIRED: "the request's time was over before it could start",
}
_FAILED = {
    FailCause.CAPACITY: "the server is at its capacity; try again",
    FailCause.DRAINING: "the part of the server that answered is on its way out; try again",
    FailCause.ASLEEP: "the server was put to sleep; try again when it has been woken up",
    FailCause.INTERNAL: "a worker had an internal error; try again",
    FailCause.TIMEOUT: "no worker answered in time; try again",
    FailCause.WORKER_LOST: "no worker is there that could finish the request; try again",
}
_PARAMS = {"prompt_token_ids": "prompt"}


def words_of_refusal(refusal: Refusal) -> str:
    """Return the message of a refusal, for HTTP's 400 and 503."""
    if refusal.code is RefusalCode.INVALID:
        return refusal.message  # the request's own fields and values
    if refusal.code is RefusalCode.NEVER_FITS:
        return "the prompt and its output are longer than this server can hold"
    if refusal.code is RefusalCode.UNSUPPORTED:
        return f"{param_of(refusal) or 'the request'}: not available on this server"
    return _REFUSED.get(refusal.code, _AGAIN)


def param_of(refusal: Refusal) -> str | None:
    """Return the field that the refusal names, by the client's name for it."""
    if refusal.param is None:
        return "prompt" if refusal.code is RefusalCode.NEVER_FITS else None
    return _PARAMS.get(refusal.param, refusal.param)


def words_of_failure(error: RequestFailed) -> str:
    """Return the message of a failure, for HTTP's 500, 503 and 504."""
    if isinstance(error, FailedClosed):
        return "two workers contradicted each other; nothing more is said (failed closed)"
    if isinstance(error, DeadlinePassed | ReaderTooSlow):
        return str(error)
    return _FAILED.get(error.cause, "no worker could finish the request; try again")
