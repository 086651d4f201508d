"""Conditions, and their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tandem.operator.api.status import Condition, ConditionType, Reason
from tandem.operator.clock import time_text


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a canary, as a reason and message of conditions."""

    ok: bool
    reason: Reason
    message: str
    targets: str
    at: float


Truth = Literal["True", "False", "Unknown"]
Word = tuple[Truth, Reason, str]
"""Status, reason and message of a condition."""
_MAX_MESSAGE = 2000


def condition_of(before: list[Condition], kind: ConditionType) -> Condition | None:
    """Return the last condition of a type, or None."""
    return next((each for each in before if each.type == kind), None)


def conditions_of(
    words: Mapping[ConditionType, Word], before: list[Condition], *, generation: int, now: float
) -> list[Condition]:
    """Return the conditions of ``words``; transition times change only with the status."""
    known = {each.type: each for each in before}
    conditions = []
    for kind, (status, reason, message) in words.items():
        old = known.get(kind)
        same = old is not None and old.status == status
        since = old.last_transition_time if old and same else time_text(now)
        conditions.append(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message[:_MAX_MESSAGE],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return conditions
