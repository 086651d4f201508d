"""Failures of attempts, and the worker or link at fault."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.errors import FailCause, Refusal, RefusalCode, RequestFailed
from tandem.protocol.ids import Incarnation


class FailedClosed(RequestFailed):
    """Two legs disagreed on a token: nothing more may be emitted."""


class ReaderTooSlow(RequestFailed):
    """The client does not read its answer, and too much of it is unread."""


LINK_CAUSES = frozenset(
    {
        FailCause.PEER,
        FailCause.TIMEOUT,
        FailCause.GONE,
        FailCause.IDENTITY,
        FailCause.DIGEST,
    }
)
"""Causes at the link between the two workers of a hand-off."""

NON_RETRYABLE = frozenset({RefusalCode.INVALID})
"""Refusals that every worker would repeat."""

UNABLE = frozenset({RefusalCode.UNSUPPORTED, RefusalCode.NEVER_FITS})
"""Refusals of requests that this worker cannot serve, and another may."""

FOR_NOW = frozenset({RefusalCode.CAPACITY, RefusalCode.ASLEEP})
"""Refusals of a worker that is full, or asleep, and may accept later."""

PAIR_REFUSALS = frozenset({RefusalCode.PEER_UNKNOWN, RefusalCode.FINGERPRINT})
"""Refusals for the link between the two workers of a hand-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """The end of an attempt: a refusal before any work, or a cause after some."""

    worker: Incarnation
    """Worker that reported the failure, or whose link was lost."""
    worker_name: str
    pair: tuple[Incarnation, Incarnation] | None = None
    """(prefill, decode) of the attempt, if it was a hand-off."""
    message: str
    cause: FailCause | None = None
    refusal: Refusal | None = None
    unsent: bool = False
    """True if the worker never received it: its link was down."""
    brought_on: bool = False
    """True if the attempt had emitted new tokens."""

    @property
    def did_work(self) -> bool:
        """Return whether it counts as an attempt."""
        return self.refusal is None and not self.unsent

    @property
    def for_now(self) -> bool:
        """Return whether the worker could accept the same request later."""
        return self.refusal is not None and self.refusal.code in FOR_NOW

    @property
    def of_handoff(self) -> bool:
        """Return whether only this hand-off is impossible, not the request: P cannot promise so
        much KV, or one of the two cannot do its half."""
        if self.pair is None or self.refusal is None or self.refusal.code not in UNABLE:
            return False
        return self.worker == self.pair[0] or self.refusal.code is RefusalCode.UNSUPPORTED

    @property
    def word(self) -> str:
        """Return the cause or refusal code, for metrics and logs."""
        if self.refusal is not None:
            return str(self.refusal.code)
        return str(self.cause)

    def __str__(self) -> str:
        verb = "refused" if self.refusal is not None else "failed"
        return f"{self.worker_name} {verb} ({self.word}): {self.message}"
