"""Resizes of Deployments, in an order in which a refusal takes away no serving pod.

Existing Deployments rise first, then new ones are made, and only then others fall: none of a role
whose rise was refused. A pod is marked just before its own Deployment falls. Called by ``writer``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import Applier, Problem
from tandem.operator.cluster.marks import Mark, admissions, departures
from tandem.operator.cluster.refused import Refused, refused
from tandem.operator.decide.observe import labelled
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision, Phase
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.workload import RevisionKey

logger = logging.getLogger(__name__)


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """One Deployment in its wanted state, and its replicas so far."""

    key: RevisionKey
    manifest: Manifest
    before: int | None
    """Replicas; None without a Deployment."""

    @property
    def after(self) -> int:
        """Return its wanted replicas."""
        count: int = self.manifest["spec"]["replicas"]
        return count

    def at(self, count: int) -> Manifest:
        """Return the same with another number of replicas."""
        return {**self.manifest, "spec": {**self.manifest["spec"], "replicas": count}}

    @property
    def is_made(self) -> bool:
        """Return whether it has to be made, for pods that it shall have."""
        return self.before is None and self.after > 0

    @property
    def falls(self) -> bool:
        """Return whether pods leave."""
        return self.before is not None and self.after < self.before


def size_of(manifest: Manifest, live: Snapshot) -> Size:
    """Return the size of a wanted Deployment, given the existing one."""
    key = labelled(manifest)
    assert key is not None, manifest["metadata"]["name"]
    there = live.find("Deployment", manifest["metadata"]["name"])
    before = None if there is None else there["spec"].get("replicas", 1)
    return Size(key=key, manifest=manifest, before=before)


class Resizing:
    """Changes of one look to Deployments."""

    def __init__(
        self, cluster: Cluster, applier: Applier, seen: Seen, decided: Decision, live: Snapshot
    ) -> None:
        self._cluster = cluster
        self._applier = applier
        self._seen = seen
        self._decided = decided
        self._live = live
        self._blocked: set[Role] = set()
        """Roles of which no Deployment may fall: other pods cannot replace the leaving ones."""
        self.kept: dict[RevisionKey, int] = {}
        """Replicas of Deployments that were to fall and did not."""
        self._found: list[Problem] = []

    def admit(self) -> bool:
        """Admit the pods of admitted revisions to routers, before clients reach routers that know
        only these. Pods that were not admitted replace no others, and no router that uses others is
        removed. Return whether all are admitted."""
        roles = {pod.name: pod.role for pod in self._seen.pods}
        for mark in admissions(self._seen.pods, self._decided.admitted):
            said = self._mark(mark)
            if said is not None:
                self._found.append(said)
                self._blocked |= {roles[mark.pod], Role.ROUTER}
        return not self._found

    def run(
        self,
        sizes: Iterable[Size],
        templates: Mapping[str, Manifest],
        *,
        may_make: bool,
        is_reachable: bool,
    ) -> list[Problem]:
        """Write all sizes; ``templates`` are stored under the names of Deployments to be made.
        Without ``may_make`` none is made. Unless a wanted Service exists (``is_reachable``), the
        last routers stay that clients may reach by the existing one."""
        sizes = list(sizes)
        for size in sizes:
            if size.before is not None and not size.falls:
                self._write(size, rises=size.after > size.before)
        coming = [size for size in sizes if size.is_made]
        if not may_make:
            self._blocked |= {size.key[0] for size in coming}
            coming = []
        for size in [size for size in coming if self._is_kept(size, templates)]:
            self._write(size, rises=True)
        falling = [size for size in sizes if size.falls]
        self.kept = {
            size.key: size.before or 0 for size in falling if not self._may_fall(size, is_reachable)
        }
        counts = {**self._decided.counts, **self.kept}
        marked = departures(self._seen.pods, self._seen.workloads, counts)
        for key in marked.keys() - {size.key for size in falling}:
            self._tell(marked[key])
        for size in falling:
            self._tell(marked.get(size.key, ()))
            if size.key not in self.kept:
                self._write(size, rises=False)
        return self._found

    def _write(self, size: Size, *, rises: bool) -> None:
        said = self._applier.apply([size.manifest], self._live)
        self._found += said
        if said and rises:
            self._blocked.add(size.key[0])

    def _is_kept(self, size: Size, templates: Mapping[str, Manifest]) -> bool:
        """Store its template, which a repair of the Deployment requires; return the success."""
        template = templates.get(size.manifest["metadata"]["name"])
        said = self._applier.create([] if template is None else [template], self._live)
        if said:
            self._found += said
            self._blocked.add(size.key[0])
        return not said

    def _may_fall(self, size: Size, is_reachable: bool) -> bool:
        if self._decided.phase is Phase.SUSPENDED:
            return True
        role, _ = size.key
        is_last = role is Role.ROUTER and size.after == 0
        return role not in self._blocked and (is_reachable or not is_last)

    def _tell(self, marks: Iterable[Mark]) -> None:
        """Mark pods that leave; pods that cannot be marked drain all the same."""
        for mark in marks:
            said = self._mark(mark)
            if said is not None:
                logger.warning("%s: not marked: %s", self._seen.owner.namespace, said.message())

    def _mark(self, mark: Mark) -> Refused | None:
        body = {"metadata": {"annotations": mark.annotations}}
        try:
            self._cluster.patch("Pod", self._seen.owner.namespace, mark.pod, body)
        except ClusterError as error:
            return refused(f"Pod {mark.pod}", error)
        return None
