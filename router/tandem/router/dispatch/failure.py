"""How an attempt ended without finishing, and whose doing it was."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.errors import FailCause, Refusal, RefusalCode, RequestFailed
from tandem.protocol.ids import Incarnation


class FailedClosed(RequestFailed):
    """Two legs disagreed on a token: nothing more may be emitted, by anybody."""


class ReaderTooSlow(RequestFailed):
    """The client does not read its answer, and too much of it waits."""


LINK_CAUSES = frozenset(
    {
        FailCause.PEER,
        FailCause.TIMEOUT,
        FailCause.GONE,
        FailCause.IDENTITY,
        FailCause.DIGEST,
    }
)
"""Causes that lie between the two workers of a hand-off."""

NON_RETRYABLE = frozenset({RefusalCode.INVALID})
"""Refusals that every worker would repeat."""

UNABLE = frozenset({RefusalCode.UNSUPPORTED, RefusalCode.NEVER_FITS})
"""Refusals that speak of what this worker can do, and another may."""

FOR_NOW = frozenset({RefusalCode.CAPACITY, RefusalCode.ASLEEP})
"""Refusals of a worker that is full, or asleep, and stays where it is."""

PAIR_REFUSALS = frozenset({RefusalCode.PEER_UNKNOWN, RefusalCode.FINGERPRINT})
"""Refusals that lie between the two workers of a hand-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """The end of an attempt: a refusal before any work, or a cause after some."""

    worker: Incarnation
    """Who said so, or whose link was lost."""
    worker_name: str
    pair: tuple[Incarnation, Incarnation] | None = None
    """(prefill, decode) of the attempt, if it was a hand-off."""
    message: str
    cause: FailCause | None = None
    refusal: Refusal | None = None
    unsent: bool = False
    """Whether the worker never got it: its link was down."""
    brought_on: bool = False
    """Whether the attempt had said something of the answer that was new."""

    @property
    def did_work(self) -> bool:
        """Whether it was an attempt at all."""
        return self.refusal is None and not self.unsent

    @property
    def for_now(self) -> bool:
        """Whether the worker could take the same request a while later."""
        return self.refusal is not None and self.refusal.code in FOR_NOW

    @property
    def of_handoff(self) -> bool:
        """Whether it says that this hand-off is impossible, which says nothing of the request:
        P cannot promise so much KV, or one of the two cannot do its half."""
        if self.pair is None or self.refusal is None or self.refusal.code not in UNABLE:
            return False
        return self.worker == self.pair[0] or self.refusal.code is RefusalCode.UNSUPPORTED

    @property
    def word(self) -> str:
        """The cause or refusal code, for metrics and logs."""
        if self.refusal is not None:
            return str(self.refusal.code)
        return str(self.cause)

    def __str__(self) -> str:
        verb = "refused" if self.refusal is not None else "failed"
        return f"{self.worker_name} {verb} ({self.word}): {self.message}"
