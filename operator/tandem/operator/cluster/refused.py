"""Refusals of the API server for one object, while it may accept others.

Found by ``apply`` and ``reconcile``, shown in the Accepted condition and in the trace of the look.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.operator import look
from tandem.operator.cluster.client import ClusterError

REFUSALS = (400, 403, 422)
"""Statuses of the API server for an object that it does not accept as it is."""
_OF_ALL = (0, 401)
"""Statuses without connection or without authentication: they concern no single object."""
_BUSY = 429
"""Status of an overloaded API server: another write would add to the load."""
_LATE = "ReadTimeoutError"
"""Reason of an error without an answer in time, on a connection that exists."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A write that was refused, while others go on."""

    what: str
    """Kind and name of a child, or another object of the request."""
    error: ClusterError
    passes: bool
    """Whether the error does not concern the object as it is: it may be accepted later."""

    def message(self) -> str:
        """Return the refused object and the API server's message, for a condition."""
        return f"{self.what}: {self.error.message or self.error}"


def refused(what: str, error: ClusterError) -> Refused:
    """Return the refusal of a write. Raises the error if any other write would meet it too."""
    if error.status in (*_OF_ALL, _BUSY):
        raise error
    look.met(error)
    return Refused(what, error, passes=error.status not in REFUSALS)


def unanswered(what: str, error: ClusterError) -> Refused:
    """Return the refusal of a question, which stays open. Raises the error if there is no
    connection. A dry run may last longer than the timeout, since it waits for webhooks."""
    if error.status in _OF_ALL and error.reason != _LATE:
        raise error
    look.met(error)
    return Refused(what, error, passes=True)
