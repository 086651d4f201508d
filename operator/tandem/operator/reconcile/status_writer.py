"""Writes of a service's status and its events."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.operator.api.status import (
    Condition,
    ConditionType,
    LLMServiceStatus,
    Reason,
)
from tandem.operator.api.values import API_VERSION
from tandem.operator.clock import time_text
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.events import event, transitions, warning
from tandem.operator.cluster.store import Store
from tandem.operator.cluster.undeclared import Undeclared
from tandem.operator.decide.observe import Snapshot
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.status import StatusInputs, next_status
from tandem.operator.decide.words import Word
from tandem.operator.desired.naming import (
    Identity,
    Manifest,
    Role,
)

logger = logging.getLogger(__name__)

KIND = "LLMService"
_MAX_MESSAGE = 2000
_REFUSED = (Reason.INVALID_SPEC, Reason.CHILD_REFUSED, Reason.QUOTA_EXCEEDED)
"""Reasons that an unreadable spec replaces."""


class StatusWriter:
    """Writer of changed statuses."""

    def __init__(self, cluster: Cluster, store: Store, undeclared: Undeclared) -> None:
        self._cluster = cluster
        self._store = store
        self._undeclared = undeclared
        self._warned: dict[str, str] = {}
        """Undeclared fields with an event, by the service's UID."""

    def write(self, seen: Seen, inputs: StatusInputs, live: Snapshot) -> None:
        status = next_status(inputs, seen.status)
        if self._declared(status) != self._declared(seen.status):
            self._undeclared.apply(self._cluster, _status_manifest(seen.owner, status))
            self._write_events(seen.owner, seen.status.conditions, status.conditions, inputs.now)
        self._warn(seen.owner, inputs.now)
        for role in inputs.wanted:
            self._write_scale(seen, live, role)

    def _declared(self, status: LLMServiceStatus) -> Any:
        return self._undeclared.declared(KIND, msgspec.to_builtins(status))

    def _warn(self, owner: Identity, now: float) -> None:
        """Send one event per service for each set of omitted fields."""
        problem = self._undeclared.problem(KIND)
        if problem is None:
            self._warned.pop(owner.uid, None)
        elif self._warned.get(owner.uid) != problem:
            self._warned[owner.uid] = problem
            self._write_event(owner, warning(owner, "CustomResourceOutdated", problem, now))

    def _write_scale(self, seen: Seen, live: Snapshot, role: Role) -> None:
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
        """Report a spec that cannot be read."""
        now = time.time()
        conditions = refused_conditions(status.conditions, why, generation, now)
        if conditions == status.conditions and status.observed_generation == generation:
            return
        after = msgspec.structs.replace(
            status, conditions=conditions, observed_generation=generation
        )
        self._undeclared.apply(self._cluster, _status_manifest(owner, after))
        self._write_events(owner, status.conditions, conditions, now)

    def is_outdated(
        self, owner: Identity, generation: int, scalers: Mapping[Role, int] | None = None
    ) -> bool:
        """Return whether the status write's answer had a newer spec or scaler than the pass.

        Its event is older than that answer, so the store will not report it.
        """
        there = self._store.find("LLMService", owner.namespace, owner.name)
        if there is None or there["metadata"]["generation"] != generation:
            return there is not None
        for role, replicas in (scalers or {}).items():
            scaler = self._store.find("LLMRoleScaler", owner.namespace, owner.child(role))
            if scaler is not None and scaler["spec"]["replicas"] != replicas:
                return True
        return False

    def _write_events(
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
    """Return the conditions of a refused service: existing pods may continue to serve."""
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
