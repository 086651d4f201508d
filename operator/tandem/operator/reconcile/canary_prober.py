"""Canaries and keys of a pass: which pods answer."""

from __future__ import annotations

import base64

from tandem.operator.decide import plan
from tandem.operator.decide.observe import Snapshot
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision, Phase
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


class CanaryProber:
    """Canaries of a pass. Answers come in a later pass."""

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
