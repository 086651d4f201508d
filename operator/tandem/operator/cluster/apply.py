"""Brings children to what they shall be: apply, create, prune, mark. Called by ``reconcile``.

An object whose live version and wanted content are those of the last apply is left alone; anything
else is applied again, so that an edit by hand lasts as long as it takes to hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tandem.operator.cluster.client import Cluster, ClusterError
from tandem.operator.cluster.tamper import is_tampered, untampered
from tandem.operator.decide.observe import PodView, WorkloadView
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.revision import digest
from tandem.operator.desired.workload import RevisionKey
from tandem.protocol.names import ANNOTATION_ADMITTED, ANNOTATION_DRAINING

_COST = "controller.kubernetes.io/pod-deletion-cost"
_DRAINING_COST = "-1000"
_REFUSALS = (400, 403, 422)
_REMEMBERED = 50_000
"""Objects; forgetting one costs an apply that changes nothing."""
PRUNED = ("ControllerRevision", "Deployment", "Job", "LLMRoleScaler", "NetworkPolicy", "Secret")
"""Kinds of which children can become superfluous while the service lives."""


class Applier:
    """Writes, remembering what it wrote. One per operator; thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._written: dict[tuple[str, str], tuple[str, str]] = {}

    def apply(self, wanted: Iterable[Manifest], live: Snapshot) -> int:
        """Apply what differs; how many objects were sent. Raises ClusterError."""
        return sum(self._apply_one(manifest, live) for manifest in wanted)

    def _apply_one(self, manifest: Manifest, live: Snapshot) -> bool:
        kind, metadata = manifest["kind"], manifest["metadata"]
        there = live.find(kind, metadata["name"])
        content = digest(manifest)
        if there is not None:
            uid, version = there["metadata"]["uid"], there["metadata"]["resourceVersion"]
            if self._written.get((kind, uid)) == (version, content):
                return False
        if there is not None and is_tampered(there):
            self._replace(untampered(manifest, there))
        result = self._cluster.apply(manifest)["metadata"]
        if len(self._written) > _REMEMBERED:
            self._written.clear()
        self._written[(kind, result["uid"])] = (result["resourceVersion"], content)
        return True

    def _replace(self, manifest: Manifest) -> None:
        try:
            self._cluster.replace(manifest)
        except ClusterError as error:
            if error.status not in (404, 409):  # changed again: its event says so
                raise

    def create(self, wanted: Iterable[Manifest], live: Snapshot) -> int:
        """Make what is absent; how many objects were made. Raises ClusterError."""
        made = 0
        for manifest in wanted:
            if live.find(manifest["kind"], manifest["metadata"]["name"]) is None:
                made += self._cluster.create(manifest) is not None
        return made

    def prune(self, live: Snapshot, keep: set[tuple[str, str]], owner_uid: str) -> int:
        """Delete children of prunable kinds that are not in ``keep``; how many."""
        gone = 0
        for kind in PRUNED:
            for item in live.of(kind):
                metadata = item["metadata"]
                owners = metadata.get("ownerReferences") or ()
                ours = any(each["uid"] == owner_uid for each in owners)
                if ours and (kind, metadata["name"]) not in keep:
                    self._cluster.delete(kind, metadata["namespace"], metadata["name"])
                    gone += 1
        return gone

    def refusal(self, manifest: Manifest) -> str | None:
        """What the API server would say against a Deployment and its pods, or None."""
        template = manifest["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "generateName": manifest["metadata"]["name"] + "-",
                "namespace": manifest["metadata"]["namespace"],
            },
            "spec": template["spec"],
        }
        try:
            for each in (manifest, pod):  # an apply answers 500 to an unknown field
                self._cluster.create(each, dry_run=True)
        except ClusterError as error:
            if error.status in _REFUSALS:
                return error.message
            raise
        return None


class Mark(msgspec.Struct, frozen=True):
    """Annotations to set (None removes) on one pod."""

    pod: str
    annotations: dict[str, str | None]


def marks(
    pods: Iterable[PodView],
    workloads: Mapping[RevisionKey, WorkloadView],
    counts: Mapping[RevisionKey, int],
    admitted: set[RevisionKey],
) -> list[Mark]:
    """Which pods are to be marked: admitted to routers, or chosen to leave next.

    A pod that is chosen hears of it before its Deployment shrinks; the choice is an optimisation,
    since whichever pod gets SIGTERM drains.
    """
    result = []
    for key, mine in _by_key(pods).items():
        leaving = _victims(mine, _surplus(key, workloads, counts))
        for pod in mine:
            changes = _admission(pod, key in admitted) | _departure(pod, pod.name in leaving)
            if changes:
                result.append(Mark(pod.name, changes))
    return result


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
    """Pods to leave: those already marked, then those not ready, then the youngest."""

    def order(pod: PodView) -> tuple[bool, bool, float]:
        return pod.annotations.get(ANNOTATION_DRAINING) != "true", pod.ready, -pod.created

    return {pod.name for pod in sorted(pods, key=order)[:surplus]}


def _admission(pod: PodView, admitted: bool) -> dict[str, str | None]:
    if pod.role is Role.ROUTER or not admitted:
        return {}
    return (
        {} if pod.annotations.get(ANNOTATION_ADMITTED) == "true" else {ANNOTATION_ADMITTED: "true"}
    )


def _departure(pod: PodView, leaves: bool) -> dict[str, str | None]:
    marked = pod.annotations.get(ANNOTATION_DRAINING) == "true"
    if leaves and not marked:
        return {ANNOTATION_DRAINING: "true", _COST: _DRAINING_COST}
    if marked and not leaves:
        return {ANNOTATION_DRAINING: None, _COST: None}
    return {}
