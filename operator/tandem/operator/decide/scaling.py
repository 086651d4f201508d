"""Wanted replicas of a role, from the resource or from a scaler within bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import Reason
from tandem.operator.decide.words import Word
from tandem.operator.desired.naming import WORKERS, Role
from tandem.operator.desired.policy import asked_replicas, is_external, scaling_bounds

_AMOUNTS = re.compile(r"used: (\S+), limited: (\S+)$")
_QUANTITY = re.compile(r"(.*?)([numkMGTPE]|[KMGTPE]i)?")
_FACTORS = {
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("num", start=-3)},
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("kMGTPE", start=1)},
    **{prefix + "i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", start=1)},
}


def is_full(message: str) -> bool:
    """Return whether a message is about a full quota."""
    return "exceeded quota" in message


def gives_back(message: str) -> bool:
    """Return whether deleting a pod with equal requests makes room in the quota.

    False if it is exceeded, or if the message has another form.
    """
    found = _AMOUNTS.search(message)
    if found is None or not is_full(message):
        return False
    try:
        used, limited = (_amounts(each) for each in found.groups())
    except (ValueError, InvalidOperation):
        return False
    return used.keys() == limited.keys() and all(used[name] <= limited[name] for name in used)


def _amounts(message: str) -> dict[str, Decimal]:
    """Return the amounts of ``pods=4,requests.memory=2Gi``. Raises ValueError or
    InvalidOperation.
    """
    pairs = [each.split("=", 1) for each in message.split(",")]
    return {name: _quantity(amount) for name, amount in pairs}


def _quantity(text: str) -> Decimal:
    number, suffix = re.fullmatch(_QUANTITY, text).groups()  # type: ignore[union-attr]
    return Decimal(number) * _FACTORS.get(suffix, Decimal(1))


class Wanted(msgspec.Struct, frozen=True):
    """Replicas of a role, and whether a scaler's count was out of bounds."""

    replicas: int
    clamped_from: int | None = None


def wanted(spec: LLMServiceSpec, role: Role, scalers: Mapping[Role, int]) -> Wanted:
    """Return the replicas of ``role``; ``scalers`` has the count of each LLMRoleScaler."""
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
            text = f"{role}: {each.clamped_from} requested, {each.replicas} allowed"
            return "True", Reason.OUT_OF_BOUNDS, text
    return "True", Reason.EXTERNAL, "LLMRoleScalers decide for " + " and ".join(external)
