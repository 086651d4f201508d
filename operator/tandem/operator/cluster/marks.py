"""Marks on pods: those that routers may use, and those that are to leave. Pure; written by
``reconcile``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tandem.operator.decide.observe import PodView, WorkloadView
from tandem.operator.desired.naming import Role
from tandem.operator.desired.workload import RevisionKey
from tandem.protocol.names import ANNOTATION_ADMITTED, ANNOTATION_DRAINING

_COST = "controller.kubernetes.io/pod-deletion-cost"
_DRAINING_COST = "-1000"


class Mark(msgspec.Struct, frozen=True):
    """Annotations to set (None removes) on one pod."""

    pod: str
    annotations: dict[str, str | None]


def admissions(pods: Iterable[PodView], admitted: set[RevisionKey]) -> list[Mark]:
    """Return the marks of workers that routers may use from now on."""
    return [
        Mark(pod.name, {ANNOTATION_ADMITTED: "true"})
        for key, mine in _by_key(pods).items()
        for pod in mine
        if pod.role is not Role.ROUTER
        and key in admitted
        and pod.annotations.get(ANNOTATION_ADMITTED) != "true"
    ]


def departures(
    pods: Iterable[PodView],
    workloads: Mapping[RevisionKey, WorkloadView],
    counts: Mapping[RevisionKey, int],
) -> dict[RevisionKey, list[Mark]]:
    """Marks of pods that are chosen to leave next, or chosen no more, by their Deployment.

    A pod that is chosen hears of it before its Deployment shrinks; the choice is an optimisation,
    since whichever pod gets SIGTERM drains. It stays chosen until its controller knows that it asks
    for as many again, which may be deleting it meanwhile.
    """
    found: dict[RevisionKey, list[Mark]] = {}
    for key, mine in _by_key(pods).items():
        leaving = _victims(mine, _surplus(key, workloads, counts))
        may_stay = _may_stay(workloads.get(key), min(counts.get(key, 0), len(mine)))
        for pod in mine:
            changes = _departure(pod, pod.name in leaving, may_stay)
            if changes:
                found.setdefault(key, []).append(Mark(pod.name, changes))
    return found


def _by_key(pods: Iterable[PodView]) -> dict[RevisionKey, list[PodView]]:
    grouped: dict[RevisionKey, list[PodView]] = {}
    for pod in pods:
        if not pod.deleting:
            grouped.setdefault((pod.role, pod.revision), []).append(pod)
    return grouped


def _surplus(
    key: RevisionKey,
    workloads: Mapping[RevisionKey, WorkloadView],
    counts: Mapping[RevisionKey, int],
) -> int:
    view = workloads.get(key)
    return 0 if view is None else max(0, view.existing - counts.get(key, 0))


def _victims(pods: list[PodView], surplus: int) -> set[str]:
    """Return the pods to leave: those already marked, then those not ready, then the youngest."""

    def order(pod: PodView) -> tuple[bool, bool, float]:
        return pod.annotations.get(ANNOTATION_DRAINING) != "true", pod.ready, -pod.created

    return {pod.name for pod in sorted(pods, key=order)[:surplus]}


def _may_stay(view: WorkloadView | None, count: int) -> bool:
    return view is None or (view.is_followed and view.asked >= count)


def _departure(pod: PodView, leaves: bool, may_stay: bool) -> dict[str, str | None]:
    marked = pod.annotations.get(ANNOTATION_DRAINING) == "true"
    if leaves and not marked:
        return {ANNOTATION_DRAINING: "true", _COST: _DRAINING_COST}
    if marked and not leaves and may_stay:
        return {ANNOTATION_DRAINING: None, _COST: None}
    return {}
