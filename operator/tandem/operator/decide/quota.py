"""Messages of the API server about a full quota: which bound is full, and how full. Pure.

A message names one quota, and of that only the amounts that would be exceeded: ``exceeded quota:
NAME, requested: pods=1, used: pods=4, limited: pods=4``.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_AMOUNTS = re.compile(r"used: (\S+), limited: (\S+)$")
_QUANTITY = re.compile(r"(.*?)([numkMGTPE]|[KMGTPE]i)?")
_FACTORS = {
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("num", start=-3)},
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("kMGTPE", start=1)},
    **{prefix + "i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", start=1)},
}


def is_full(said: str) -> bool:
    """Return whether a message is the API server's about a full quota."""
    return "exceeded quota" in said


def gives_back(said: str) -> bool:
    """Return whether such a quota admits a pod again when one with equal requests is deleted: no
    amount is used beyond its limit, as after a limit was lowered. False if the message has another
    form."""
    found = _AMOUNTS.search(said)
    if found is None or not is_full(said):
        return False
    try:
        used, limited = (_amounts(each) for each in found.groups())
    except (ValueError, InvalidOperation):
        return False
    return used.keys() == limited.keys() and all(used[name] <= limited[name] for name in used)


def _amounts(said: str) -> dict[str, Decimal]:
    """Return amounts by resource, of ``pods=4,requests.memory=2Gi``. Raises ValueError or
    InvalidOperation."""
    pairs = [each.split("=", 1) for each in said.split(",")]
    return {name: _quantity(amount) for name, amount in pairs}


def _quantity(said: str) -> Decimal:
    number, suffix = re.fullmatch(_QUANTITY, said).groups()  # type: ignore[union-attr]
    return Decimal(number) * _FACTORS.get(suffix, Decimal(1))
