"""Managers of fields: fields that the operator made by a POST become fields that it applies.

A POST closes a race that an apply leaves open, but its fields would stay the operator's in a second
way: an apply that drops one (a retired key, say) would not remove it. Pure; called by ``apply``.
"""

from __future__ import annotations

import copy
from typing import Any

from tandem.operator.desired.naming import MANAGER, Manifest


def held_by_apply(item: Manifest) -> list[Manifest] | None:
    """Return managedFields with the operator's writes as one apply; None if they are so already."""
    entries: list[Manifest] = item["metadata"].get("managedFields") or []
    written = [each for each in entries if _is_ours(each) and each["operation"] == "Update"]
    if not written:
        return None
    ours = [each for each in entries if _is_ours(each)]
    fields: Manifest = {}
    for each in ours:
        fields = _union(fields, each.get("fieldsV1") or {})
    one = {**ours[0], "operation": "Apply", "fieldsV1": fields}
    return [one, *(each for each in entries if not _is_ours(each))]


def _is_ours(entry: Manifest) -> bool:
    return entry.get("manager") == MANAGER and not entry.get("subresource")


def _union(one: Any, other: Any) -> Any:
    """Return the union of two sets of fields; a set is a tree of maps."""
    result = copy.deepcopy(one)
    for key, value in other.items():
        result[key] = _union(result[key], value) if key in result else copy.deepcopy(value)
    return result
