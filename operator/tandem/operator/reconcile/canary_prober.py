"""Writes of the status; canaries and keys, which pods answer."""

from __future__ import annotations

import base64
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
from tandem.operator.decide import plan
from tandem.operator.decide.observe import Snapshot
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision, Phase
from tandem.operator.decide.status import StatusInputs, status_of
from tandem.operator.decide.words import Word
from tandem.operator.desired.naming import (
    WORKERS,
    Identity,
    Manifest,
    Role,
)
from tandem.operator.desired.policy import probe_port, task_of
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.router import canary_secret, canary_secret_of
from tandem.operator.desired.worker import kept_probe_port
from tandem.operator.probes.canary import Question
from tandem.operator.probes.keywatch import KeyWatch, PodAccess
from tandem.operator.probes.probing import Key, Probes
from tandem.protocol import names

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

    def say(self, seen: Seen, inputs: StatusInputs, live: Snapshot) -> None:
        status = status_of(inputs, seen.status)
        if self._declared(status) != self._declared(seen.status):
            self._undeclared.apply(self._cluster, _status_manifest(seen.owner, status))
            self._tell(seen.owner, seen.status.conditions, status.conditions, inputs.now)
        self._warn(seen.owner, inputs.now)
        for role in inputs.wanted:
            self._say_scale(seen, live, role)

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

    def _say_scale(self, seen: Seen, live: Snapshot, role: Role) -> None:
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
        self._tell(owner, status.conditions, conditions, now)

    def is_outdated(
        self, owner: Identity, generation: int, scalers: Mapping[Role, int] | None = None
    ) -> bool:
        """Return whether the status write's answer had a newer spec or scaler than the look.

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


class CanaryProber:
    """Canaries of a look. Answers come in a later look."""

    def __init__(self, probes: Probes, keywatch: KeyWatch) -> None:
        self._probes = probes
        self._keywatch = keywatch

    def all_read(self, key: Key, seen: Seen, token: str | None) -> bool:
        """Return whether pods with older keys have the newest public keys."""
        newest = seen.status.keys.generation
        if seen.status.keys.read >= newest:
            self._keywatch.forget(key)
            return True
        older = [p for p in seen.pods if not p.deleting and (p.key_generation or newest) < newest]
        wanted = frozenset(f"{role}.{newest}" for role in Role)
        others = {
            key: port
            for key, template in seen.templates.items()
            if (port := kept_probe_port(template)) is not None
        }
        access = PodAccess(probe_port(seen.spec, Role.DECODE), others, token or "")
        return self._keywatch.all_read(key, older, wanted, access)

    def canaries(self, key: Key, seen: Seen, decided: Decision, live: Snapshot) -> float | None:
        """Send canaries if there are pods; return the seconds until the next one.

        Verdicts on pods that a suspension deletes are dropped.
        """
        if decided.phase is Phase.SUSPENDED:
            return self._probes.poll(key, (), about=frozenset(), links=0)
        asked = plan.judged(decided)
        questions = [
            question
            for revisions in asked.values()
            if (question := _question(seen, revisions, live)) is not None
        ]
        pairs = 1
        for role in WORKERS:
            pairs *= sum(pod.ready and not pod.deleting for pod in seen.pods if pod.role is role)
        return self._probes.poll(key, questions, about=asked.keys(), links=pairs)


def canary_token(live: Snapshot, owner: Identity, template: Manifest | None = None) -> str | None:
    """Return the token of canaries, of the template's Secret or the service's own, or None."""
    mounted = None if template is None else canary_secret_of(template)
    secret = None if mounted is None else live.find("Secret", mounted)
    secret = secret or live.find("Secret", canary_secret(owner))
    if secret is None:
        return None
    return base64.b64decode(secret["data"][names.CANARY_TOKEN_FILE]).decode()


def _question(seen: Seen, revisions: dict[Role, str], live: Snapshot) -> Question | None:
    """Return the question for these revisions; None without ready pods of all roles, or the
    Secret.
    """
    routers = seen.templates.get((Role.ROUTER, revisions.get(Role.ROUTER, "")))
    token = canary_token(live, seen.owner, routers)
    if token is None:
        return None
    wanted = plan.replicas(seen)
    workers = [role for role in WORKERS if wanted[role].replicas > 0]
    needed = [Role.ROUTER, *workers]
    ready = {
        (pod.role, pod.revision): pod.ip for pod in seen.pods if pod.ready and not pod.deleting
    }
    if any((role, revisions.get(role, "")) not in ready for role in needed):
        return None
    address = ready[(Role.ROUTER, revisions[Role.ROUTER])]
    host = f"[{address}]" if address and ":" in address else address
    return Question(
        base_url=f"http://{host}:{names.ROUTER_PORT}",
        model=(seen.spec.model.served_names or [seen.spec.model.name])[0],
        token=token,
        targets=service_revision({str(role): name for role, name in revisions.items()}),
        task=task_of(seen.spec),
        prefill_revision=revisions[Role.PREFILL] if Role.PREFILL in workers else None,
        decode_revision=revisions[Role.DECODE] if Role.DECODE in workers else None,
    )
