"""Writes of a pass: Secrets, children, marks on pods; and the prune.

A refusal holds back only writes that depend on it.
"""

from __future__ import annotations

import logging
import secrets as randomness
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import zmq

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import Applier, Problem
from tandem.operator.cluster.client import Refused, refused
from tandem.operator.cluster.repair import Repairs
from tandem.operator.decide import plan
from tandem.operator.decide.keyring import KeyPlan
from tandem.operator.decide.observe import (
    PodView,
    Snapshot,
    WorkloadView,
    labelled,
)
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision, Phase
from tandem.operator.desired import secrets
from tandem.operator.desired.compose import Objects, base, desired
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.pod import keys_secret
from tandem.operator.desired.references import secrets_of
from tandem.operator.desired.router import canary_secret
from tandem.operator.desired.workload import RevisionKey
from tandem.protocol.names import ANNOTATION_ADMITTED, ANNOTATION_DRAINING

_COST = "controller.kubernetes.io/pod-deletion-cost"
_DRAINING_COST = "-1000"


class Mark(msgspec.Struct, frozen=True):
    """Annotations to set on a pod; None removes."""

    pod: str
    annotations: dict[str, str | None]


def admissions(pods: Iterable[PodView], admitted: set[RevisionKey]) -> list[Mark]:
    """Return the marks of workers that routers may use."""
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
    """Return the marks of pods that are to leave, or to stay again, by their Deployment.

    A pod is marked before its Deployment shrinks. It stays marked until its controller knows the
    higher count.
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
    """Return the pods to leave: marked ones, then those not ready, then the youngest."""

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


logger = logging.getLogger(__name__)


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Wanted Deployment, and its current replicas."""

    key: RevisionKey
    manifest: Manifest
    before: int | None
    """Replicas; None without a Deployment."""

    @property
    def after(self) -> int:
        count: int = self.manifest["spec"]["replicas"]
        return count

    def at(self, count: int) -> Manifest:
        """Return the manifest with another number of replicas."""
        return {**self.manifest, "spec": {**self.manifest["spec"], "replicas": count}}

    @property
    def is_made(self) -> bool:
        """Return whether it has to be made."""
        return self.before is None and self.after > 0

    @property
    def falls(self) -> bool:
        return self.before is not None and self.after < self.before


def size_of(manifest: Manifest, live: Snapshot) -> Size:
    """Return the size of a wanted Deployment."""
    key = labelled(manifest)
    assert key is not None, manifest["metadata"]["name"]
    there = live.find("Deployment", manifest["metadata"]["name"])
    before = None if there is None else there["spec"].get("replicas", 1)
    return Size(key=key, manifest=manifest, before=before)


class Resizing:
    """Changes of one pass to Deployments."""

    def __init__(
        self, cluster: Cluster, applier: Applier, seen: Seen, decided: Decision, live: Snapshot
    ) -> None:
        self._cluster = cluster
        self._applier = applier
        self._seen = seen
        self._decided = decided
        self._live = live
        self._blocked: set[Role] = set()
        """Roles of which no Deployment may shrink."""
        self.kept: dict[RevisionKey, int] = {}
        """Replicas of Deployments that did not shrink as wanted."""
        self._found: list[Problem] = []

    def admit(self) -> bool:
        """Admit the pods of admitted revisions; return whether all are.

        Before that, they replace no other pods, and clients do not reach their routers.
        """
        roles = {pod.name: pod.role for pod in self._seen.pods}
        for mark in admissions(self._seen.pods, self._decided.admitted):
            problems = self._mark(mark)
            if problems is not None:
                self._found.append(problems)
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
        """Write all sizes; ``templates`` are stored for Deployments to be made.

        Without ``may_make`` none is made. Unless the wanted Service exists (``is_reachable``), the
        last routers that clients reach stay.
        """
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
            self._mark_all(marked[key])
        for size in falling:
            self._mark_all(marked.get(size.key, ()))
            if size.key not in self.kept:
                self._write(size, rises=False)
        return self._found

    def _write(self, size: Size, *, rises: bool) -> None:
        problems = self._applier.apply([size.manifest], self._live)
        self._found += problems
        if problems and rises:
            self._blocked.add(size.key[0])

    def _is_kept(self, size: Size, templates: Mapping[str, Manifest]) -> bool:
        """Store the template, which a repair requires; return the success."""
        template = templates.get(size.manifest["metadata"]["name"])
        problems = self._applier.create([] if template is None else [template], self._live)
        if problems:
            self._found += problems
            self._blocked.add(size.key[0])
        return not problems

    def _may_fall(self, size: Size, is_reachable: bool) -> bool:
        if self._decided.phase is Phase.SUSPENDED:
            return True
        role, _ = size.key
        is_last = role is Role.ROUTER and size.after == 0
        return role not in self._blocked and (is_reachable or not is_last)

    def _mark_all(self, marks: Iterable[Mark]) -> None:
        """Mark pods that leave; unmarked pods drain as well."""
        for mark in marks:
            problem = self._mark(mark)
            if problem is not None:
                logger.warning("%s: not marked: %s", self._seen.owner.namespace, problem.message())

    def _mark(self, mark: Mark) -> Refused | None:
        body = {"metadata": {"annotations": mark.annotations}}
        try:
            self._cluster.patch("Pod", self._seen.owner.namespace, mark.pod, body)
        except ClusterError as error:
            return refused(f"Pod {mark.pod}", error)
        return None


class Writer:
    """Writer of a service's child objects. Methods return the problems of objects that could not be
    written. They raise ClusterError if the API server cannot be reached.
    """

    def __init__(self, cluster: Cluster, applier: Applier, repairs: Repairs) -> None:
        self._cluster = cluster
        self._applier = applier
        self._repairs = repairs

    def secrets(
        self, facts: Facts, missing: list[Role], live: Snapshot
    ) -> tuple[dict[Role, str], list[Problem]]:
        """Make missing key pairs of ``facts.key_generation``, and the canary's token.

        Return public keys by role, and the problems.
        """
        publics: dict[Role, str] = {}
        found: list[Problem] = []
        for role in missing:
            public, secret = (text.decode() for text in zmq.curve_keypair())
            there = self._applier.ensure(secrets.keys(facts, role, public, secret), live)
            if isinstance(there, dict):
                publics[role] = secrets.public_of(there)
            else:
                found.append(there)
        token = secrets.canary_token(facts, randomness.token_urlsafe(32))
        found += self._applier.create([token], live)
        return publics, found

    def base(self, facts: Facts, live: Snapshot) -> list[Problem]:
        """Write the children without a revision."""
        return self._applier.apply(base(facts), live)

    def children(
        self,
        seen: Seen,
        facts: Facts,
        keys: KeyPlan,
        decided: Decision,
        live: Snapshot,
        *,
        before: Sequence[Problem],
        may_start: bool,
    ) -> list[Problem]:
        """Write the decided children, and mark pods before their Deployments shrink.

        With problems ``before`` nothing new is made.
        """
        keep = plan.kept(decided.counts, seen, plan.remembered(decided))
        counts = {key: count for key, count in decided.counts.items() if key in keep}
        objects = desired(facts, counts, seen.templates, routers=decided.routers)
        services = _of("Service", objects.applied)
        sizes = [size_of(each, live) for each in _of("Deployment", objects.applied)]
        shown = [size.manifest for size in sizes if size.before is not None or not before]
        made = [
            each
            for each in objects.created
            if (not before or live.find(each["kind"], each["metadata"]["name"]))
            and (may_start or each["kind"] != "Job")
        ]
        resizing = Resizing(self._cluster, self._applier, seen, decided, live)
        if not resizing.admit():
            # Clients stay with the old routers.
            services = [s for s in services if not live.find("Service", s["metadata"]["name"])]
        key, uid = (seen.owner.namespace, seen.owner.name), seen.owner.uid
        others = ("Service", "Deployment")
        rest = [*(each for each in objects.applied if each["kind"] not in others), *services]
        self._repairs.want(key, uid, Objects(applied=[*rest, *shown], created=made))
        found = self._applier.apply(services, live)
        is_reachable = not found
        coming = {size.manifest["metadata"]["name"] for size in sizes if size.before is None}
        templates = {
            name: each
            for each in _of("ControllerRevision", made)
            if (name := each["metadata"]["name"]) in coming
        }
        found += self._applier.create(
            [each for each in made if each not in templates.values()], live
        )
        may_make = is_reachable and not before
        found += resizing.run(sizes, templates, may_make=may_make, is_reachable=is_reachable)
        if resizing.kept:  # a manual scale must not make it shrink
            held = {
                size.manifest["metadata"]["name"]: size.at(resizing.kept[size.key])
                for size in sizes
                if size.key in resizing.kept
            }
            shown = [held.get(each["metadata"]["name"], each) for each in shown]
            self._repairs.want(key, uid, Objects(applied=[*rest, *shown], created=made))
        found += self._applier.rewrite(live, seen.owner.uid)
        names_kept = {(each["kind"], each["metadata"]["name"]) for each in objects.applied}
        names_kept |= {(each["kind"], each["metadata"]["name"]) for each in objects.created}
        names_kept |= _secrets_kept(facts, keys, facts.publics)
        if not {("Secret", name) for name in live.names("Secret")} <= names_kept:
            names_kept |= _secrets_mounted(objects.applied, live)
        if not any(isinstance(each, Refused) for each in (*before, *found)):
            found += self._applier.prune(live, names_kept, seen.owner.uid)
        return found


def _of(kind: str, manifests: list[Manifest]) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def _secrets_mounted(applied: list[Manifest], live: Snapshot) -> set[tuple[str, str]]:
    """Return the Secrets that existing Deployments and pods mount."""
    specs = [each["spec"]["template"]["spec"] for each in _of("Deployment", applied)]
    specs += [each.get("spec") for each in live.of("Pod")]
    return {("Secret", name) for spec in specs for name in secrets_of(spec)}


def _secrets_kept(facts: Facts, keys: KeyPlan, publics: Mapping[str, str]) -> set[tuple[str, str]]:
    generations = {keys.generation, keys.active}
    generations |= {int(name.rpartition(".")[2]) for name in publics}
    kept = {("Secret", canary_secret(facts.owner))}
    for number in generations:
        at = msgspec.structs.replace(facts, key_generation=number)
        kept |= {("Secret", keys_secret(at, role)) for role in Role}
    return kept
