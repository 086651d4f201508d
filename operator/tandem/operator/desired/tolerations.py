"""Tolerations of lost nodes: shorter than Kubernetes' own five minutes.

Tolerations have no merge key, so a podTemplate's replace the operator's; missing ones are added
again. Pure; called by ``pod``.
"""

from __future__ import annotations

from typing import Any

from tandem.operator.desired.naming import Manifest

_LEAVE_DEAD_NODE = 30
"""Seconds after which pods of a dead node are replaced; the routers knew within three."""
_STATES = ("not-ready", "unreachable")


def with_gone_nodes(given: Any) -> Any:
    """Return tolerations with those of lost nodes, except those that ``given`` covers: by key, or
    by no key, which means all. Kubernetes adds its own in the same way."""
    if given is None:
        given = []
    if not isinstance(given, list):
        return given
    return [*given, *(own for state in _STATES if not _named(own := _gone(state), given))]


def _named(own: Manifest, given: list[Any]) -> bool:
    return any(
        (each.get("key") or own["key"]) == own["key"]
        and (each.get("effect") or own["effect"]) == own["effect"]
        for each in given
        if isinstance(each, dict)
    )


def _gone(state: str) -> Manifest:
    return {
        "key": f"node.kubernetes.io/{state}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": _LEAVE_DEAD_NODE,
    }
