"""How many replicas a role shall have: the resource's word, or a scaler's within bounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired.naming import Role
from tandem.operator.desired.policy import asked_replicas, is_external, scaling_bounds


class Wanted(msgspec.Struct, frozen=True):
    """Replicas of a role, and whether a scaler asked for what its bounds do not allow."""

    replicas: int
    clamped_from: int | None = None


def wanted(spec: LLMServiceSpec, role: Role, scalers: Mapping[Role, int]) -> Wanted:
    """Replicas of ``role``; ``scalers`` holds what each LLMRoleScaler asks for."""
    if not is_external(spec, role) or role not in scalers:
        return Wanted(asked_replicas(spec, role))
    low, high = scaling_bounds(spec, role)
    asked = scalers[role]
    inside = min(max(asked, low), high)
    return Wanted(inside, None if inside == asked else asked)
