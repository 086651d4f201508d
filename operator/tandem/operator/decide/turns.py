"""Order of services if a quota has no room for two that come up at once. Pure.

A quota is first come, first served, pod by pod: two services may each get half of a pair, and none
serves. The older one goes first. A younger one that is not whole either gives its pods back, and
comes up when the older one serves or no longer lacks room. Called by ``reconciler``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tandem.operator.decide.observe import WorkloadView
from tandem.operator.decide.quota import is_full
from tandem.operator.desired.naming import Manifest, map_of
from tandem.operator.desired.workload import RevisionKey

Workloads = Mapping[RevisionKey, WorkloadView]


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """Another service of the namespace."""

    name: str
    created: str
    has_served: bool
    has_failed: bool
    """Whether it missed its deadline: it may never fit, and no service waits for it any more."""
    workloads: Workloads

    @property
    def turn(self) -> tuple[bool, str, str]:
        """Return the sort key of the service's turn."""
        return self.has_failed, self.created, self.name


def neighbour(resource: Manifest, workloads: Workloads) -> Neighbour | None:
    """Return the view of a service; None for one without wanted pods."""
    metadata = resource["metadata"]
    if "deletionTimestamp" in metadata or map_of(resource.get("spec")).get("suspend"):
        return None
    rollout = map_of(map_of(resource.get("status")).get("rollout"))
    return Neighbour(
        name=metadata["name"],
        created=metadata["creationTimestamp"],
        has_served=bool(rollout.get("stable")),
        has_failed=bool(rollout.get("failed")),
        workloads=workloads,
    )


def goes_first(mine: Neighbour, others: Iterable[Neighbour]) -> str | None:
    """Return the name of the service that ``mine`` gives way to; None if it gives way to none."""
    if mine.has_served or _is_whole(mine):
        return None
    older = [
        each
        for each in others
        if each.turn < mine.turn
        and not each.has_served
        and not each.has_failed
        and lacks_room(each.workloads)
    ]
    return min(older, key=lambda each: each.turn).name if older else None


def lacks_room(workloads: Workloads) -> bool:
    """Return whether a quota refuses pods that are asked for."""
    return any(
        each.asked > each.existing and each.refused is not None and is_full(each.refused)
        for each in workloads.values()
    )


def _is_whole(service: Neighbour) -> bool:
    """Return whether all pods are there that are asked for; not where none is asked for."""
    views = [each for each in service.workloads.values() if each.asked]
    return bool(views) and all(each.existing >= each.asked for each in views)
