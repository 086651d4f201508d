"""A budget is one time at both ends: whoever notices first, what is said of it is the same."""

from __future__ import annotations

import pytest
from tests.kvtransfer.machines import A, Face

from tandem.kvtransfer.handoff.messages import Gone, GoneReason
from tandem.protocol.errors import FailCause
from tandem.protocol.kv import LoadFailed

BUDGET_MS = 100


def ended(reason: GoneReason, after_ms: int) -> FailCause:
    """Why a hand-off ends whose GONE is heard so long after OPEN, by D that was away till then."""
    face = Face()
    face.open(A, budget_ms=BUDGET_MS)
    face.now += after_ms  # type: ignore[assignment]
    face.deliver_d(Gone(A, reason))
    (told,) = face.d_told
    assert isinstance(told, LoadFailed)
    assert face.is_free()
    return told.cause


@pytest.mark.parametrize("reason", [GoneReason.UNKNOWN, GoneReason.EXPIRED])
def test_what_the_producer_says_of_a_spent_budget_is_a_timeout(reason: GoneReason):
    """Its deadline is that of the consumer, whose thread may hear of it before it looks itself."""
    assert ended(reason, BUDGET_MS) is FailCause.TIMEOUT
    assert ended(reason, BUDGET_MS - 1) is FailCause.GONE


@pytest.mark.parametrize("reason", [GoneReason.REFUSED, GoneReason.CANCELLED, GoneReason.INTERNAL])
def test_what_it_says_for_other_reasons_stays_what_it_is(reason: GoneReason):
    assert ended(reason, 10 * BUDGET_MS) is FailCause.GONE
