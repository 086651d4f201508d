"""Wanted replicas of a role, from the resource or from a scaler within bounds.

Pure; called by ``plan`` and ``status``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.operator.api.conditions import Reason
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.decide.words import Word
from tandem.operator.desired.naming import WORKERS, Role
from tandem.operator.desired.policy import asked_replicas, is_external, scaling_bounds


class Wanted(msgspec.Struct, frozen=True):
    """Replicas of a role, and whether a scaler's count was outside its bounds."""

    replicas: int
    clamped_from: int | None = None


def wanted(spec: LLMServiceSpec, role: Role, scalers: Mapping[Role, int]) -> Wanted:
    """Return the replicas of ``role``; ``scalers`` holds the count of each LLMRoleScaler."""
    if not is_external(spec, role) or role not in scalers:
        return Wanted(asked_replicas(spec, role))
    low, high = scaling_bounds(spec, role)
    asked = scalers[role]
    inside = min(max(asked, low), high)
    return Wanted(inside, None if inside == asked else asked)


def scaling_word(spec: LLMServiceSpec, replicas: Mapping[Role, Wanted]) -> Word:
    """Return the condition that names the source of the count."""
    external = [role for role in WORKERS if is_external(spec, role)]
    if not external:
        return "False", Reason.MANUAL, "replicas in the resource decide"
    for role in external:
        each = replicas[role]
        if each.clamped_from is not None:
            text = f"{role}: {each.clamped_from} asked, {each.replicas} allowed"
            return "True", Reason.OUT_OF_BOUNDS, text
    return "True", Reason.EXTERNAL, "LLMRoleScalers decide for " + " and ".join(external)
