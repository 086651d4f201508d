"""Whether pods of a new revision fit where those of the old one are: what they ask for, compared.

A quota counts a new pod on top of all that run, and a rollout in place needs no more than the room
of one that goes. Called by ``acceptance``.
"""

from __future__ import annotations

from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from tandem.operator.desired.naming import Manifest

_AMOUNTS = ("requests", "limits")
Asked = dict[str, Decimal]
"""Amounts by ``requests.NAME`` and ``limits.NAME``."""


def fits(pod: Manifest, old: Manifest) -> bool:
    """Whether a pod of this spec asks for no more of anything than one of the spec ``old``. Raises
    ValueError for an amount that is none."""
    there = asked_of(old)
    return all(amount <= there.get(name, 0) for name, amount in asked_of(pod).items())


def asked_of(pod: Manifest) -> Asked:
    """What a quota counts of a pod: its containers and sidecars together, or an init container that
    asks for more. Raises ValueError."""
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
    """What a container, or a pod as a whole, says. A limit alone is a request, too."""
    given = holder.get("resources") or {}
    limits = given.get("limits") or {}
    said = {"limits": limits, "requests": {**limits, **(given.get("requests") or {})}}
    return {
        f"{kind}.{name}": parse_quantity(amount)  # type: ignore[no-untyped-call]
        for kind in _AMOUNTS
        for name, amount in said[kind].items()
    }
