"""Writer of the service's status, of the roles' /scale, and of an event for each transition."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.operator.api.conditions import ConditionType, Reason
from tandem.operator.api.status import Condition, LLMServiceStatus
from tandem.operator.api.values import API_VERSION
from tandem.operator.clock import time_text
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.events import event, transitions, warning
from tandem.operator.cluster.store import Store
from tandem.operator.cluster.undeclared import Undeclared
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.decide.status import Picture, status_of
from tandem.operator.decide.words import Word
from tandem.operator.desired.naming import Identity, Manifest, Role

logger = logging.getLogger(__name__)

KIND = "LLMService"
_MAX_MESSAGE = 2000
_REFUSED = (Reason.INVALID_SPEC, Reason.CHILD_REFUSED, Reason.QUOTA_EXCEEDED)
"""Reasons of not being ready that an unreadable spec replaces."""


class Teller:
    """Writer of statuses that changed, and of no others."""

    def __init__(self, cluster: Cluster, store: Store, undeclared: Undeclared) -> None:
        self._cluster = cluster
        self._store = store
        self._undeclared = undeclared
        self._warned: dict[str, str] = {}
        """Undeclared fields for which each service had an event, by UID."""

    def say(self, seen: Seen, picture: Picture, live: Snapshot) -> None:
        status = status_of(picture, seen.status)
        if self._declared(status) != self._declared(seen.status):
            self._undeclared.apply(self._cluster, _status_manifest(seen.owner, status))
            self._tell(seen.owner, seen.status.conditions, status.conditions, picture.now)
        self._warn(seen.owner, picture.now)
        for role in picture.wanted:
            self._say_scale(seen, live, role)

    def _declared(self, status: LLMServiceStatus) -> Any:
        return self._undeclared.declared(KIND, msgspec.to_builtins(status))

    def _warn(self, owner: Identity, now: float) -> None:
        """Send one event a service for each set of fields that its status leaves out."""
        problem = self._undeclared.problem(KIND)
        if problem is None:
            self._warned.pop(owner.uid, None)
        elif self._warned.get(owner.uid) != problem:
            self._warned[owner.uid] = problem
            self._write_event(owner, warning(owner, "CustomResourceOutdated", problem, now))

    def _say_scale(self, seen: Seen, live: Snapshot, role: Role) -> None:
        """Write the values of a role's /scale."""
        scaler = live.find("LLMRoleScaler", seen.owner.child(role))
        if scaler is None:
            return
        selector = ",".join(f"{k}={v}" for k, v in seen.owner.selector(role).items())
        existing = sum(pod.role is role and not pod.deleting for pod in seen.pods)
        status = {
            "replicas": existing,
            "selector": selector,
            "observedReplicas": seen.scalers[role],
        }
        manifest: Manifest = {
            "apiVersion": API_VERSION,
            "kind": "LLMRoleScaler",
            "metadata": {"name": seen.owner.child(role), "namespace": seen.owner.namespace},
            "status": status,
        }
        if scaler.get("status") != self._undeclared.declared("LLMRoleScaler", status):
            self._undeclared.apply(self._cluster, manifest)

    def refuse(self, owner: Identity, generation: int, status: LLMServiceStatus, why: Word) -> None:
        """Report a spec that cannot be read, and nothing else."""
        now = time.time()
        conditions = refused_conditions(status.conditions, why, generation, now)
        if conditions == status.conditions and status.observed_generation == generation:
            return
        after = msgspec.structs.replace(
            status, conditions=conditions, observed_generation=generation
        )
        self._undeclared.apply(self._cluster, _status_manifest(owner, after))
        self._tell(owner, status.conditions, conditions, now)

    def is_outdated(
        self, owner: Identity, generation: int, scalers: Mapping[Role, int] | None = None
    ) -> bool:
        """Return whether the answer to a status write had a newer spec, or a newer count of a
        scaler, than the look. Its own event is older than that answer, so the store will not report
        it as new."""
        there = self._store.find("LLMService", owner.namespace, owner.name)
        if there is None or there["metadata"]["generation"] != generation:
            return there is not None
        for role, replicas in (scalers or {}).items():
            scaler = self._store.find("LLMRoleScaler", owner.namespace, owner.child(role))
            if scaler is not None and scaler["spec"]["replicas"] != replicas:
                return True
        return False

    def _tell(
        self, owner: Identity, before: list[Condition], after: list[Condition], now: float
    ) -> None:
        for condition in transitions(before, after):
            self._write_event(owner, event(owner, condition, now))

    def _write_event(self, owner: Identity, manifest: Manifest) -> None:
        try:
            self._cluster.create(manifest)
        except ClusterError as error:
            logger.warning("%s/%s: no event: %s", owner.namespace, owner.name, error)


def refused_conditions(
    before: list[Condition], why: Word, generation: int, now: float
) -> list[Condition]:
    """Return the conditions of a refused service: not accepted, and not ready unless it was;
    existing pods are left and may serve on."""
    status, reason, message = why
    known = {each.type: each for each in before}
    kinds = [ConditionType.ACCEPTED]
    ready = known.get(ConditionType.READY)
    if ready is None or ready.reason in _REFUSED:
        kinds.append(ConditionType.READY)
    for kind in kinds:
        old = known.get(kind)
        same = old is not None and old.status == status
        known[kind] = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message[:_MAX_MESSAGE],
            last_transition_time=old.last_transition_time if old and same else time_text(now),
            observed_generation=generation,
        )
    return list(known.values())


def _status_manifest(owner: Identity, status: LLMServiceStatus) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": owner.name, "namespace": owner.namespace, "uid": owner.uid},
        "status": msgspec.to_builtins(status),
    }
