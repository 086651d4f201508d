"""The failure retry policy: what may be tried after an attempt failed, and when to give up.

The one owner of that decision. It keeps no order of kinds of attempts itself: it excludes workers
and links, and placement chooses the cheapest of the rest. That gives another P, local prefill on
D, another D, in that order if all else is equal. The last attempt does not hand off. If no worker
is left, the dispatcher allows those again whose lost link is back. While it waits, it asks full
ones again. Pure: no sockets, no clock.
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


MAX_REFUSALS = 8
"""Most refusals. They do no work and are not attempts, but take a round trip each. So do requests
that could not be sent."""
MAX_RESUMES = 8
"""Attempts beyond the failing ones for an answer that they extended: a request that itself ends its
workers is to end no more of them."""


class AttemptKind(StrEnum):
    """Kind of an attempt, compared with the one before."""

    FIRST = "first"
    ANOTHER_PREFILL = "another_prefill"
    LOCAL_PREFILL = "local_prefill"
    ANOTHER_DECODE = "another_decode"
    SAME = "same"


@dataclass(slots=True)
class RetryPolicy:
    """One request's failures and the exclusions by them."""

    max_attempts: int
    exclusions: Exclusions = field(default_factory=Exclusions)
    failures: list[AttemptFailure] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        """Return the attempts that did work and failed."""
        return sum(failure.did_work for failure in self.failures)

    @property
    def num_left(self) -> int:
        """Return the attempts that may still be made. With one attempt at most there is no retry.
        Else attempts that extended the answer have a bound of their own: its client has read it,
        and cannot send it again."""
        if self.max_attempts == 1:
            return 1 - self.num_failed
        in_vain = sum(each.did_work and not each.brought_on for each in self.failures)
        most = self.max_attempts + MAX_RESUMES
        return min(self.max_attempts - in_vain, most - self.num_failed)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return all failures, first to last."""
        return tuple(str(failure) for failure in self.failures)

    @property
    def exhausted(self) -> bool:
        """Return whether no further attempt may be made."""
        refused = len(self.failures) - self.num_failed
        return self.num_left <= 0 or refused >= MAX_REFUSALS

    @property
    def non_retryable(self) -> Refusal | None:
        """Return the refusal that every worker would repeat, if the last one was such."""
        last = self.failures[-1].refusal if self.failures else None
        return last if last is not None and last.code in NON_RETRYABLE else None

    @property
    def unsupported(self) -> Refusal | None:
        """Return the refusal to report if no worker supports the request: all refused for that.
        Refusals of a hand-off only do not count."""
        refusals = [each.refusal for each in self.failures if not each.of_handoff]
        if refusals and all(r and r.code in UNABLE for r in refusals):
            return refusals[-1]
        return None

    @property
    def only_capacity(self) -> bool:
        """Return whether every failure was a worker that was full, asleep or draining."""
        return bool(self.failures) and all(
            failure.for_now
            or (failure.refusal is not None and failure.refusal.code is RefusalCode.DRAINING)
            for failure in self.failures
        )

    @property
    def only_asleep(self) -> bool:
        """Return whether all workers that were asked are asleep, or were put to sleep meanwhile."""
        asleep = str(RefusalCode.ASLEEP)
        return bool(self.failures) and all(each.word == asleep for each in self.failures)

    def record(self, failure: AttemptFailure) -> None:
        """Record the end of an attempt, and rule out what it showed as unusable."""
        self.failures.append(failure)
        if failure.refusal is not None:
            self._rule_out_refused(failure, failure.refusal)
        else:
            self._rule_out_failed(failure)
        if self.num_left <= 1:
            self.exclusions = replace(self.exclusions, no_handoff=True)

    def ask_again(self) -> None:
        """Forget refusals of workers that were full or asleep, as they may have room by now."""
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
        """Rule out P if it cannot hand over, all hand-offs if D cannot take over."""
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
    """Return the name of the step from one placement to the next."""
    if before is None:
        return AttemptKind.FIRST
    if after.worker != before.worker:
        return AttemptKind.ANOTHER_DECODE
    if after.prefill == before.prefill:
        return AttemptKind.SAME
    return AttemptKind.LOCAL_PREFILL if after.prefill is None else AttemptKind.ANOTHER_PREFILL
