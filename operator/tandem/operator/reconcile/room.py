"""Check that pods of a new revision fit into the room of the old ones, by their resource requests.

A quota counts a new pod on top of all that run, and a rollout in place requires no more than the
room of one that is deleted. Called by ``acceptance``.
"""

from __future__ import annotations

from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from tandem.operator.desired.naming import Manifest

_AMOUNTS = ("requests", "limits")
Asked = dict[str, Decimal]
"""Amounts by ``requests.NAME`` and ``limits.NAME``."""


def fits(pod: Manifest, old: Manifest) -> bool:
    """Return whether a pod of this spec requests no more of any resource than one of the spec
    ``old``. Raises ValueError for an invalid amount."""
    there = asked_of(old)
    return all(amount <= there.get(name, 0) for name, amount in asked_of(pod).items())


def asked_of(pod: Manifest) -> Asked:
    """Return the amounts that a quota counts for a pod: its containers and sidecars together, or an
    init container that requests more. Raises ValueError."""
    inits = pod.get("initContainers") or ()
    running = [*pod["containers"], *(each for each in inits if _stays(each)), pod]
    found: Asked = {}
    for each in running:
        for name, amount in _asked(each).items():
            found[name] = found.get(name, Decimal(0)) + amount
    for each in inits:
        for name, amount in ({} if _stays(each) else _asked(each)).items():
            found[name] = max(amount, found.get(name, amount))
    return found


def _stays(init: Manifest) -> bool:
    return init.get("restartPolicy") == "Always"


def _asked(holder: Manifest) -> Asked:
    """Return the amounts of a container, or of a whole pod. A limit alone is a request, too."""
    given = holder.get("resources") or {}
    limits = given.get("limits") or {}
    said = {"limits": limits, "requests": {**limits, **(given.get("requests") or {})}}
    return {
        f"{kind}.{name}": parse_quantity(amount)  # type: ignore[no-untyped-call]
        for kind in _AMOUNTS
        for name, amount in said[kind].items()
    }
