"""Retry policy: what may be tried after a failed attempt, and when to give up.

It excludes workers and links; placement chooses the cheapest of the rest. The last attempt does not
hand off.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from tandem.protocol.errors import (
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
)
from tandem.protocol.ids import Incarnation
from tandem.router.placement.policy import Placement
from tandem.router.placement.snapshot import Exclusions


class FailedClosed(RequestFailed):
    """Two legs disagreed on a token: the request ends."""


class ReaderTooSlow(RequestFailed):
    """The client leaves too much of its answer unread."""


LINK_CAUSES = frozenset(
    {
        FailCause.PEER,
        FailCause.TIMEOUT,
        FailCause.GONE,
        FailCause.IDENTITY,
        FailCause.DIGEST,
    }
)
"""Causes at the link of a hand-off."""

NON_RETRYABLE = frozenset({RefusalCode.INVALID})
"""Refusals that every worker would repeat."""

UNABLE = frozenset({RefusalCode.UNSUPPORTED, RefusalCode.NEVER_FITS})
"""Refusals of requests that another worker may serve."""

FOR_NOW = frozenset({RefusalCode.CAPACITY, RefusalCode.ASLEEP})
"""Refusals of workers that may accept later."""

PAIR_REFUSALS = frozenset({RefusalCode.PEER_UNKNOWN, RefusalCode.FINGERPRINT})
"""Refusals because of the link of a hand-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """End of an attempt: a refusal before any work, or a cause after some."""

    worker: Incarnation
    """Worker that reported the failure, or was lost."""
    worker_name: str
    pair: tuple[Incarnation, Incarnation] | None = None
    """(prefill, decode) of a hand-off."""
    message: str
    cause: FailCause | None = None
    refusal: Refusal | None = None
    unsent: bool = False
    """Whether the worker never received it."""
    brought_on: bool = False
    """Whether the attempt emitted new tokens."""

    @property
    def did_work(self) -> bool:
        """Return whether it counts as an attempt."""
        return self.refusal is None and not self.unsent

    @property
    def for_now(self) -> bool:
        """Return whether the worker could accept the request later."""
        return self.refusal is not None and self.refusal.code in FOR_NOW

    @property
    def of_handoff(self) -> bool:
        """Return whether only this hand-off is impossible, not the request."""
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


MAX_REFUSALS = 8
"""Maximum refusals and unsent requests, which are not attempts."""
MAX_RESUMES = 8
"""Maximum additional attempts for an answer that they extended."""


class AttemptKind(StrEnum):
    """Kind of an attempt, compared with the previous one."""

    FIRST = "first"
    ANOTHER_PREFILL = "another_prefill"
    LOCAL_PREFILL = "local_prefill"
    ANOTHER_DECODE = "another_decode"
    SAME = "same"


@dataclass(slots=True)
class RetryPolicy:
    """Failures and exclusions of one request."""

    max_attempts: int
    exclusions: Exclusions = field(default_factory=Exclusions)
    failures: list[AttemptFailure] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        """Return the number of failed attempts that did work."""
        return sum(failure.did_work for failure in self.failures)

    @property
    def num_left(self) -> int:
        """Return the number of remaining attempts.

        Attempts that extended the answer have their own bound. Without retries there are none.
        """
        if self.max_attempts == 1:
            return 1 - self.num_failed
        in_vain = sum(each.did_work and not each.brought_on for each in self.failures)
        most = self.max_attempts + MAX_RESUMES
        return min(self.max_attempts - in_vain, most - self.num_failed)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(str(failure) for failure in self.failures)

    @property
    def exhausted(self) -> bool:
        refused = len(self.failures) - self.num_failed
        return self.num_left <= 0 or refused >= MAX_REFUSALS

    @property
    def non_retryable(self) -> Refusal | None:
        """Return the last refusal if every other worker would refuse for the same reason."""
        last = self.failures[-1].refusal if self.failures else None
        return last if last is not None and last.code in NON_RETRYABLE else None

    @property
    def unsupported(self) -> Refusal | None:
        """Return the refusal to report if all workers lack support, hand-offs excluded."""
        refusals = [each.refusal for each in self.failures if not each.of_handoff]
        if refusals and all(r and r.code in UNABLE for r in refusals):
            return refusals[-1]
        return None

    @property
    def only_capacity(self) -> bool:
        """Return whether all workers were full, asleep or draining."""
        return bool(self.failures) and all(
            failure.for_now
            or (failure.refusal is not None and failure.refusal.code is RefusalCode.DRAINING)
            for failure in self.failures
        )

    @property
    def only_asleep(self) -> bool:
        """Return whether all workers are asleep."""
        asleep = str(RefusalCode.ASLEEP)
        return bool(self.failures) and all(each.word == asleep for each in self.failures)

    def record(self, failure: AttemptFailure) -> None:
        """Record the end of an attempt, and exclude what failed."""
        self.failures.append(failure)
        if failure.refusal is not None:
            self._rule_out_refused(failure, failure.refusal)
        else:
            self._rule_out_failed(failure)
        if self.num_left <= 1:
            self.exclusions = replace(self.exclusions, no_handoff=True)

    def ask_again(self) -> None:
        """Drop refusals of workers that were full or asleep."""
        kept = [each for each in self.failures if not each.for_now]
        self.failures, self.exclusions = [], Exclusions()
        for failure in kept:
            self.record(failure)

    def _rule_out_refused(self, failure: AttemptFailure, refusal: Refusal) -> None:
        if failure.of_handoff:
            self._rule_out_handoff(failure)
        elif refusal.code in PAIR_REFUSALS and failure.pair is not None:
            pairs = self.exclusions.pairs | {failure.pair}
            self.exclusions = replace(self.exclusions, pairs=pairs)
        elif refusal.code not in (RefusalCode.DUPLICATE, RefusalCode.EXPIRED):
            self._exclude(failure.worker)

    def _rule_out_handoff(self, failure: AttemptFailure) -> None:
        """Exclude P if it cannot hand over, all hand-offs if D cannot take over."""
        assert failure.pair is not None
        if failure.worker == failure.pair[0]:
            prefill = self.exclusions.prefill | {failure.worker}
            self.exclusions = replace(self.exclusions, prefill=prefill)
        else:
            self.exclusions = replace(self.exclusions, no_handoff=True)

    def _rule_out_failed(self, failure: AttemptFailure) -> None:
        if failure.pair is not None and failure.cause in LINK_CAUSES:
            prefill = self.exclusions.prefill | {failure.pair[0]}
            self.exclusions = replace(self.exclusions, prefill=prefill)
        else:
            self._exclude(failure.worker)

    def _exclude(self, worker: Incarnation) -> None:
        workers = self.exclusions.workers | {worker}
        self.exclusions = replace(self.exclusions, workers=workers)


def kind_of_attempt(before: Placement | None, after: Placement) -> AttemptKind:
    """Return the kind of the step from one placement to the next."""
    if before is None:
        return AttemptKind.FIRST
    if after.worker != before.worker:
        return AttemptKind.ANOTHER_DECODE
    if after.prefill == before.prefill:
        return AttemptKind.SAME
    return AttemptKind.LOCAL_PREFILL if after.prefill is None else AttemptKind.ANOTHER_PREFILL
