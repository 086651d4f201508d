"""Rehearsal of one reconcile pass of one service: its writes and its status.

A changed resource is taken as the API server would, with defaults and checks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Set
from typing import Any

import msgspec

from tandem.operator.api.service import status_of
from tandem.operator.api.status import ConditionType, LLMServiceStatus, Reason
from tandem.operator.api.values import API_VERSION
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import Applier
from tandem.operator.cluster.repair import Repairs
from tandem.operator.cluster.store import CHILDREN, SERVICE, Store
from tandem.operator.decide.observe import PodView, Problem
from tandem.operator.decide.rollout import token_name
from tandem.operator.decide.words import Verdict
from tandem.operator.desired.naming import Identity, Manifest, Role
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.probes.canary import Question
from tandem.operator.probes.keywatch import KeyWatch, PodAccess
from tandem.operator.probes.probing import (
    Asked,
    Key,
    Known,
    Probes,
)
from tandem.operator.probes.reach import Reach
from tandem.operator.probes.refusals import Refusals
from tandem.operator.reconcile.reconciler import Reconciler
from tandem.operator.rehearse.stage import Change, Difference, Stage, differences
from tandem.operator.settings import OperatorSettings
from tandem.protocol.errors import InvalidParameter, TandemError
from tandem.protocol.names import LABEL_REVISION, LABEL_ROLE, LABEL_SERVICE


def _ignore(_key: Key) -> None:
    """Do nothing."""


class ToldProbes(Probes):
    """Canaries and links from the status."""

    def __init__(self, status: LLMServiceStatus) -> None:
        super().__init__(0.0, _ignore)
        self._of_status = Known(links=status.links)
        name = status.rollout.servable or token_name(status.rollout)
        for each in status.conditions:
            is_known = each.status != "Unknown" and each.reason != Reason.SUSPENDED
            if each.type == ConditionType.SERVABLE and is_known:
                verdict = Verdict(
                    ok=each.status == "True",
                    reason=Reason(each.reason),
                    message=each.message or "",
                    targets=name,
                    at=time.time(),
                )
                self._of_status.asked[name] = Asked(verdict=verdict)

    def known(self, key: Key) -> Known:
        return self._of_status

    def poll(
        self, key: Key, questions: Iterable[Question], *, about: Set[str], links: int
    ) -> float | None:
        return None


class ToldKeys(KeyWatch):
    """Keys of pods from the status."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, _ignore)

    def all_read(
        self, key: Key, pods: Iterable[PodView], wanted: frozenset[str], access: PodAccess
    ) -> bool:
        return not list(pods)


class NoRefusals(Refusals):
    """No reasons of routers."""

    def __init__(self) -> None:
        super().__init__(_ignore)

    def known(self, key: Key, pods: Iterable[PodView], token: str) -> dict[str, Problem]:
        return {}


class NoReach(Reach):
    """No checks of addresses."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, _ignore, OperatorMetrics(), 0.0)

    def look(self, owner: Identity, pods: Iterable[PodView]) -> None:
        """Do nothing."""


class NewRevision(msgspec.Struct, frozen=True, kw_only=True):
    """Revision of a role whose pod template differs from that of the running pods."""

    role: str
    before: str | None
    after: str
    differences: list[Difference]


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one reconcile pass with dry runs."""

    service: str
    """Namespace and name."""
    exists: bool
    generation: int
    spec: list[Difference]
    """Changes of the file to the resource."""
    before: LLMServiceStatus
    after: LLMServiceStatus
    changes: list[Change]
    revisions: list[NewRevision]


def rehearse(
    stage: Stage,
    settings: OperatorSettings,
    namespace: str,
    name: str,
    changed: Manifest | None = None,
) -> Rehearsal:
    """Run one pass.

    Raises TandemError, ClusterError (also for a missing right) and InvalidParameter for a file of
    another object.
    """
    there = stage.get(SERVICE, namespace, name)
    resource = there if changed is None else _as_taken(stage, there, changed, namespace, name)
    if resource is None:
        raise TandemError(f"no LLMService {name} in namespace {namespace}, and no file was given")
    if "deletionTimestamp" in resource["metadata"]:
        raise TandemError(f"LLMService {name} in namespace {namespace} is being deleted")
    store = Store()
    store.put(SERVICE, resource)
    selector = f"{LABEL_SERVICE}={name}"
    for kind in CHILDREN:
        for item in stage.items(kind, namespace, selector):
            store.put(kind, {"kind": kind, **item})
    status = status_of(resource)
    _reconciler(stage, store, settings, status)((namespace, name))
    deployments = store.all("Deployment")
    return Rehearsal(
        service=f"{namespace}/{name}",
        exists=there is not None,
        generation=resource["metadata"]["generation"],
        spec=[] if changed is None else _spec_differences(there, resource),
        before=status,
        after=stage.status or status,
        changes=stage.changes,
        revisions=_new_revisions(stage, deployments),
    )


def _as_taken(
    stage: Stage, there: Manifest | None, changed: Manifest, namespace: str, name: str
) -> Manifest:
    """Return the file's resource as the API server would take it."""
    metadata = changed.get("metadata") or {}
    if changed.get("kind") != SERVICE:
        raise InvalidParameter("kind", changed.get("kind"), SERVICE)
    if metadata.get("name") != name:
        raise InvalidParameter("metadata.name", metadata.get("name"), name)
    if metadata.get("namespace", namespace) != namespace:
        raise InvalidParameter("metadata.namespace", metadata["namespace"], namespace)
    wanted: Manifest = {
        "apiVersion": API_VERSION,
        "kind": SERVICE,
        "metadata": {"name": name, "namespace": namespace},
        "spec": changed.get("spec"),
    }
    if there is None:
        taken = _tried(stage, wanted)
    else:
        kept = {k: v for k, v in there["metadata"].items() if k != "managedFields"}
        taken = stage.taken({**wanted, "metadata": kept})
        taken["status"] = there.get("status") or {}
    taken["metadata"].setdefault("resourceVersion", "0")
    return {**taken, "kind": SERVICE}


def _tried(stage: Stage, wanted: Manifest) -> Manifest:
    made = stage.create(wanted, dry_run=True)
    if made is None:
        where = wanted["metadata"]
        raise ClusterError(
            409, "AlreadyExists", f"{where['namespace']}/{where['name']} was created meanwhile"
        )
    return made


def _reconciler(
    stage: Stage, store: Store, settings: OperatorSettings, status: LLMServiceStatus
) -> Reconciler:
    applier, metrics = Applier(stage), OperatorMetrics()
    return Reconciler(
        stage,
        store,
        settings,
        ToldProbes(status),
        applier,
        Repairs(stage, applier, lambda _key: None, metrics),
        ToldKeys(stage),
        NoRefusals(),
        NoReach(stage),
    )


def _spec_differences(there: Manifest | None, resource: Manifest) -> list[Difference]:
    def bare(item: Manifest | None) -> Manifest:
        return {"spec": {} if item is None else item.get("spec", {})}

    return differences(bare(there), bare(resource))


def _new_revisions(stage: Stage, deployments: list[Manifest]) -> list[NewRevision]:
    """Return the Deployments that would be made, each with the largest of its role."""
    found = []
    for change in stage.changes:
        if change.kind != "Deployment" or change.verb != "create":
            continue
        made = stage.made("Deployment", change.name)
        role = _label(made, LABEL_ROLE)
        others = [each for each in deployments if _label(each, LABEL_ROLE) == role]
        old = max(others, key=lambda each: each["spec"].get("replicas", 0), default=None)
        found.append(
            NewRevision(
                role=role,
                before=None if old is None else _label(old, LABEL_REVISION),
                after=_label(made, LABEL_REVISION),
                differences=[] if old is None else differences(_pods(old), _pods(made)),
            )
        )
    order = [str(role) for role in Role]
    return sorted(found, key=lambda each: order.index(each.role))


def _label(deployment: Manifest, label: str) -> str:
    text: str = deployment["spec"]["template"]["metadata"]["labels"].get(label, "")
    return text


def _pods(deployment: Manifest) -> dict[str, Any]:
    """Return the template of its pods, without the revision's name."""
    template = deployment["spec"]["template"]
    labels = {k: v for k, v in template["metadata"]["labels"].items() if k != LABEL_REVISION}
    return {"metadata": {**template["metadata"], "labels": labels}, "spec": template["spec"]}
