"""What the API server does not take of one object, while it may take others.

Found by ``apply`` and ``reconcile``, told in the Accepted condition and in the trace of the look.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.operator import look
from tandem.operator.cluster.client import ClusterError

REFUSALS = (400, 403, 422)
"""What the API server says of an object that it does not take as it is."""
_OF_ALL = (0, 401)
"""Nobody was reached, or we are nobody there: said of no object."""
_BUSY = 429
"""The API server has too much to do: another write is none of what it needs."""
_LATE = "ReadTimeoutError"
"""No answer in time, on a connection that is there."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Something that was not done; others go on."""

    what: str
    """Kind and name of a child, or what else was asked for."""
    error: ClusterError
    passes: bool
    """It says nothing of the object as it is: that may be taken yet."""

    def message(self) -> str:
        """What was refused and the API server's words, for a condition."""
        return f"{self.what}: {self.error.message or self.error}"


def refused(what: str, error: ClusterError) -> Refused:
    """What an error says of a write. Raises it where it would be that of any other write, too."""
    if error.status in (*_OF_ALL, _BUSY):
        raise error
    look.met(error)
    return Refused(what, error, passes=error.status not in REFUSALS)


def unanswered(what: str, error: ClusterError) -> Refused:
    """What an error says of a question, which leaves that open. Raises it where there is no
    connection; a dry run may last longer than we wait, since it waits for webhooks."""
    if error.status in _OF_ALL and error.reason != _LATE:
        raise error
    look.met(error)
    return Refused(what, error, passes=True)
