"""One look at one service: read everything, decide, write what differs, say what is.

Level-triggered: nothing is remembered between two looks but answers of canaries, and every look
starts from what the API server says now. Called by the queue's threads; a ClusterError means that
the queue tries again later.
"""

from __future__ import annotations

import base64
import logging
import secrets as randomness
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import zmq

from tandem.operator.api import reading
from tandem.operator.api.conditions import ConditionType, Reason
from tandem.operator.api.status import Condition, LLMServiceStatus
from tandem.operator.api.values import API_VERSION
from tandem.operator.clock import time_text
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import Applier, marks
from tandem.operator.cluster.events import event, transitions
from tandem.operator.cluster.gather import missing_reference, snapshot
from tandem.operator.cluster.repair import Repairs
from tandem.operator.decide import plan
from tandem.operator.decide.keyring import KeyPlan, may_speak, plan_keys
from tandem.operator.decide.modelcheck import ModelVerdict, judge
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision, Phase, token_name
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.decide.status import Picture, Word, status_of
from tandem.operator.desired import secrets
from tandem.operator.desired.compose import base, desired, target_revisions
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import WORKERS, Identity, Manifest, Role
from tandem.operator.desired.pod import keys_secret
from tandem.operator.desired.policy import probe_port
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.router import canary_secret, url
from tandem.operator.desired.workload import deployment, rendered
from tandem.operator.probes.canary import Question
from tandem.operator.probes.keywatch import KeyWatch
from tandem.operator.probes.probing import Key, Probes
from tandem.operator.settings import OperatorSettings
from tandem.protocol import names

logger = logging.getLogger(__name__)

SOON = 5.0
"""Seconds to the next look while something is under way that no watch tells of."""


class Reconciler:
    """Brings services to what they shall be. Calls for one key must not overlap."""

    def __init__(
        self,
        cluster: Cluster,
        settings: OperatorSettings,
        probes: Probes,
        applier: Applier,
        repairs: Repairs,
        keywatch: KeyWatch,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._probes = probes
        self._applier = applier
        self._repairs = repairs
        self._keywatch = keywatch
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="lists")
        self._accepted: dict[Key, str] = {}

    def __call__(self, key: Key) -> float | None:
        """Look at a service; seconds until it should be looked at again, None for no hurry."""
        resource = self._cluster.get("LLMService", *key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._probes.forget(key)
            self._repairs.forget(key)
            self._keywatch.forget(key)
            self._accepted.pop(key, None)
            return None
        owner = Identity(key[0], key[1], resource["metadata"]["uid"])
        status = reading.status_of(resource)
        try:
            spec = reading.spec_of(resource)
        except msgspec.ValidationError as error:
            self._refuse(owner, resource, status, str(error))
            return None
        live = snapshot(self._cluster, self._pool, owner, resource["metadata"]["creationTimestamp"])
        seen = plan.see(owner, resource["metadata"]["generation"], spec, status, live)
        return self._bring(key, seen, live)

    def _bring(self, key: Key, seen: Seen, live: Snapshot) -> float | None:
        now = time.time()
        keys = plan_keys(
            seen.held,
            seen.status.keys,
            rotation_id=seen.spec.security.key_rotation_id,
            in_use=seen.in_use(),
            now=now,
            publish_seconds=self._settings.key_publish_seconds,
            all_read=self._all_read(key, seen),
        )
        facts = self._facts(seen, live, keys)
        missing = missing_reference(self._cluster, key[0], seen.spec)
        patience = self._settings.unschedulable_seconds
        model = judge(seen.spec, seen.job, seen.status.model, missing, now=now, patience=patience)
        facts = msgspec.structs.replace(facts, pinned=model.status.resolved_revision)
        self._applier.apply(base(facts), live)
        accepted = self._accept(key, seen, facts)
        decided = plan.decision(
            seen,
            facts,
            may_move=accepted[0] == "True" and model.may_start,
            servable=self._probes.known(key).servable(),
            now=now,
            hopeless=model.hopeless,
        )
        self._write(seen, facts, keys, decided, live)
        wait = self._question(key, seen, facts, decided, live)
        picture = self._picture(key, seen, facts, accepted, model, decided, keys, now)
        self._say(seen, picture)
        return self._next_look(picture, keys, wait)

    def _all_read(self, key: Key, seen: Seen) -> bool:
        """Whether pods with older keys have the public keys of the newest generation."""
        newest = seen.status.keys.generation
        if seen.status.keys.read >= newest:
            self._keywatch.forget(key)
            return True
        older = [p for p in seen.pods if not p.deleting and (p.key_generation or newest) < newest]
        wanted = frozenset(f"{role}.{newest}" for role in Role)
        return self._keywatch.all_read(key, older, wanted, probe_port(seen.spec, Role.DECODE))

    def _facts(self, seen: Seen, live: Snapshot, keys: KeyPlan) -> Facts:
        """Facts, after making the keys that are missing."""
        known = may_speak(seen.held, seen.published, in_use=seen.in_use(), retired=keys.retired)
        facts = Facts(
            owner=seen.owner,
            spec=seen.spec,
            settings=self._settings,
            key_generation=keys.generation,
        )
        for role in keys.missing:
            public, secret = (text.decode() for text in zmq.curve_keypair())
            if self._cluster.create(secrets.keys(facts, role, public, secret)) is None:
                name = keys_secret(facts, role)
                raise ClusterError(409, "AlreadyExists", f"Secret {name} is about to be collected")
            known[(role, keys.generation)] = public
        if live.find("Secret", canary_secret(facts)) is None:
            self._cluster.create(secrets.canary_token(facts, randomness.token_urlsafe(32)))
        publics = {f"{role}.{number}": public for (role, number), public in known.items()}
        return msgspec.structs.replace(facts, key_generation=keys.active, publics=publics)

    def _accept(self, key: Key, seen: Seen, facts: Facts) -> Word:
        """The Accepted condition; the API server is asked until it has accepted a revision.

        A refusal may end without a change here: a priority class or a quota comes later.
        """
        word = plan.accepted(facts)
        if word[0] != "True":
            return word
        asked = f"{seen.generation} {sorted(target_revisions(facts).items())}"
        if self._accepted.get(key) == asked:
            return word
        for role in Role:
            revision = facts.revision(role)
            if (role, revision) in seen.workloads:
                continue
            manifest = deployment(facts, role, revision, 0, rendered(facts, role))
            said = self._applier.refusal(manifest)
            if said is not None:
                return ("False", Reason.POD_TEMPLATE_INVALID, f"{role}: {said}")
        self._accepted[key] = asked
        return word

    def _write(
        self, seen: Seen, facts: Facts, keys: KeyPlan, decided: Decision, live: Snapshot
    ) -> None:
        """Children as decided, and pods marked before their Deployments shrink."""
        for mark in marks(seen.pods, seen.workloads, decided.counts, decided.admitted):
            body = {"metadata": {"annotations": mark.annotations}}
            self._cluster.patch("Pod", seen.owner.namespace, mark.pod, body)
        keep = plan.kept(decided.counts, seen, plan.remembered(decided))
        counts = {key: count for key, count in decided.counts.items() if key in keep}
        routers = plan.reachable_routers(decided)
        objects = desired(facts, counts, seen.templates, routers=routers)
        self._repairs.want((seen.owner.namespace, seen.owner.name), seen.owner.uid, objects)
        self._applier.create(objects.created, live)
        self._applier.apply(objects.applied, live)
        names_kept = {(each["kind"], each["metadata"]["name"]) for each in objects.applied}
        names_kept |= {(each["kind"], each["metadata"]["name"]) for each in objects.created}
        names_kept |= self._secrets_kept(facts, keys)
        self._applier.prune(live, names_kept, seen.owner.uid)

    def _secrets_kept(self, facts: Facts, keys: KeyPlan) -> set[tuple[str, str]]:
        generations = {keys.generation, keys.active}
        generations |= {int(name.rpartition(".")[2]) for name in facts.publics}
        kept = {("Secret", canary_secret(facts))}
        for number in generations:
            at = msgspec.structs.replace(facts, key_generation=number)
            kept |= {("Secret", keys_secret(at, role)) for role in Role}
        return kept

    def _question(
        self, key: Key, seen: Seen, facts: Facts, decided: Decision, live: Snapshot
    ) -> float | None:
        """Ask canaries when there is somebody to ask; seconds until the next one."""
        token = live.find("Secret", canary_secret(facts))
        if decided.phase is Phase.SUSPENDED or token is None:
            return None
        secret = base64.b64decode(token["data"][names.CANARY_TOKEN_FILE]).decode()
        asked = plan.judged(decided)
        questions = [
            question
            for revisions in asked.values()
            if (question := self._asked(seen, revisions, secret)) is not None
        ]
        pairs = 1
        for role in WORKERS:
            pairs *= sum(pod.ready and not pod.deleting for pod in seen.pods if pod.role is role)
        return self._probes.poll(key, questions, about=asked.keys(), links=pairs)

    def _asked(self, seen: Seen, revisions: dict[Role, str], token: str) -> Question | None:
        """What to ask of these revisions; None as long as one of their roles has no ready pod."""
        prefill = plan.replicas(seen)[Role.PREFILL].replicas > 0
        needed = [Role.ROUTER, Role.DECODE, *([Role.PREFILL] if prefill else [])]
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
            prefill_revision=revisions[Role.PREFILL] if prefill else None,
            decode_revision=revisions[Role.DECODE],
        )

    def _picture(
        self,
        key: Key,
        seen: Seen,
        facts: Facts,
        accepted: Word,
        model: ModelVerdict,
        decided: Decision,
        keys: KeyPlan,
        now: float,
    ) -> Picture:
        known = self._probes.known(key)
        return Picture(
            owner=seen.owner,
            spec=seen.spec,
            generation=seen.generation,
            url=url(facts),
            accepted=accepted,
            model=model,
            decision=decided,
            wanted=plan.replicas(seen),
            pods=seen.pods,
            workloads=seen.workloads,
            keys=keys.status,
            key_wait=keys.waits,
            canary=known.verdict(plan.serving(decided)),
            pilot=known.verdict(token_name(decided.memory)),
            links=known.links,
            now=now,
            unschedulable_seconds=self._settings.unschedulable_seconds,
        )

    def _say(self, seen: Seen, picture: Picture) -> None:
        status = status_of(picture, seen.status)
        if status != seen.status:
            self._cluster.apply(_status_manifest(seen.owner, status), subresource="status")
            self._tell(seen.owner, seen.status.conditions, status.conditions, picture.now)
        for role in picture.wanted:
            self._say_scale(seen, picture, role)

    def _say_scale(self, seen: Seen, picture: Picture, role: Role) -> None:
        """What /scale shows of a role."""
        if role not in seen.scalers:
            return
        selector = ",".join(f"{k}={v}" for k, v in seen.owner.selector(role).items())
        existing = sum(pod.role is role and not pod.deleting for pod in seen.pods)
        manifest: Manifest = {
            "apiVersion": API_VERSION,
            "kind": "LLMRoleScaler",
            "metadata": {"name": seen.owner.child(role), "namespace": seen.owner.namespace},
            "status": {
                "replicas": existing,
                "selector": selector,
                "observedReplicas": seen.scalers[role],
            },
        }
        self._cluster.apply(manifest, subresource="status")

    def _refuse(
        self, owner: Identity, resource: Manifest, status: LLMServiceStatus, why: str
    ) -> None:
        """A spec that cannot be read: say so and touch nothing."""
        generation, now = resource["metadata"]["generation"], time.time()
        condition = Condition(
            type=ConditionType.ACCEPTED,
            status="False",
            reason=Reason.INVALID_SPEC,
            message=why,
            last_transition_time=time_text(now),
            observed_generation=generation,
        )
        known = {each.type: each for each in status.conditions}
        old = known.get(condition.type)
        if old is not None and (old.reason, old.message) == (condition.reason, why):
            return
        conditions = [*(each for each in status.conditions if each is not old), condition]
        after = msgspec.structs.replace(
            status, conditions=conditions, observed_generation=generation
        )
        self._cluster.apply(_status_manifest(owner, after), subresource="status")
        self._tell(owner, status.conditions, conditions, now)

    def _tell(
        self, owner: Identity, before: list[Condition], after: list[Condition], now: float
    ) -> None:
        for condition in transitions(before, after):
            try:
                self._cluster.create(event(owner, condition, now))
            except ClusterError as error:
                logger.warning("%s/%s: no event: %s", owner.namespace, owner.name, error)

    def _next_look(self, picture: Picture, keys: KeyPlan, wait: float | None) -> float | None:
        waits = [wait] if wait is not None else []
        if keys.waits > 0:
            waits.append(keys.waits)
        quiet = picture.decision.phase in (Phase.STABLE, Phase.SUSPENDED, Phase.PAUSED)
        if not quiet or not picture.model.ready or any(not pod.ready for pod in picture.pods):
            waits.append(SOON)
        return min(waits, default=None)

    def close(self) -> None:
        """Let go of threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _status_manifest(owner: Identity, status: LLMServiceStatus) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "LLMService",
        "metadata": {"name": owner.name, "namespace": owner.namespace},
        "status": msgspec.to_builtins(status),
    }
