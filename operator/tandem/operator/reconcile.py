"""One look at one service: read everything, decide, write what differs, say what is.

Level-triggered: nothing is remembered between two looks but answers of canaries, and every look
starts from what the API server told last, our own writes included: one that finds nothing to do
asks nobody. Called by the queue's threads; a ClusterError means that the queue tries again later.
"""

from __future__ import annotations

import base64
import logging
import secrets as randomness
import time
from typing import Any

import msgspec
import zmq

from tandem.operator.acceptance import Acceptance, refused_conditions, taken_word
from tandem.operator.api import reading
from tandem.operator.api.status import Condition, LLMServiceStatus
from tandem.operator.api.values import API_VERSION
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import Applier, marks
from tandem.operator.cluster.events import event, transitions
from tandem.operator.cluster.gather import References, snapshot
from tandem.operator.cluster.ownership import Taken
from tandem.operator.cluster.repair import Repairs
from tandem.operator.cluster.store import Store
from tandem.operator.decide import observe, plan
from tandem.operator.decide.keyring import KeyPlan, may_speak, plan_keys
from tandem.operator.decide.modelcheck import ModelVerdict, judge, may_have_job
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision, Phase, token_name
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.decide.status import Picture, Word, status_of
from tandem.operator.desired import secrets
from tandem.operator.desired.compose import base, desired
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import WORKERS, Identity, Manifest, Role
from tandem.operator.desired.pod import keys_secret
from tandem.operator.desired.policy import probe_port
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.router import canary_secret, url
from tandem.operator.probes.canary import Question
from tandem.operator.probes.keywatch import Door, KeyWatch
from tandem.operator.probes.probing import Key, Probes
from tandem.operator.probes.reach import Reach
from tandem.operator.probes.refusals import Refusals
from tandem.operator.settings import OperatorSettings
from tandem.protocol import names

logger = logging.getLogger(__name__)

SOON = 5.0
"""Seconds to the next look while something is under way that no watch tells of."""

REFERENCE_SECONDS = 300.0
"""Secrets and claims that a spec names count as being there for so long, or twice that."""


class Reconciler:
    """Brings services to what they shall be. Calls for one key must not overlap."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        settings: OperatorSettings,
        probes: Probes,
        applier: Applier,
        repairs: Repairs,
        keywatch: KeyWatch,
        refusals: Refusals,
        reach: Reach,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._references = References(cluster, REFERENCE_SECONDS)
        self._settings = settings
        self._probes = probes
        self._applier = applier
        self._repairs = repairs
        self._keywatch = keywatch
        self._refusals = refusals
        self._reach = reach
        self._acceptance = Acceptance(cluster, applier)

    def __call__(self, key: Key) -> float | None:
        """Look at a service; seconds until it should be looked at again, None for no hurry."""
        resource = self._store.find("LLMService", *key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._probes.forget(key)
            self._repairs.forget(key)
            self._keywatch.forget(key)
            self._refusals.forget(key)
            self._reach.forget(key)
            self._acceptance.forget(key)
            self._references.forget(key)
            return None
        owner = Identity(key[0], key[1], resource["metadata"]["uid"])
        status = reading.status_of(resource)
        try:
            spec = reading.spec_of(resource)
        except reading.Unreadable as error:
            self._refuse(owner, resource, status, str(error))
            return None
        live = snapshot(self._store, owner, resource["metadata"]["creationTimestamp"])
        seen = plan.see(owner, resource["metadata"]["generation"], spec, status, live)
        self._reach.look(owner, seen.pods)
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
            all_read=self._all_read(key, seen, live),
        )
        facts, taken = self._facts(seen, live, keys)
        missing = self._references.missing(key, seen.spec)
        patience = self._settings.unschedulable_seconds
        waits = may_have_job(
            seen.job,
            suspended=bool(seen.spec.suspend),
            others=lambda: observe.unfinished(self._store.all("Job")),
            most=self._settings.model_jobs,
        )
        model = judge(
            seen.spec,
            seen.job,
            seen.status.model,
            missing,
            waits=waits,
            now=now,
            patience=patience,
        )
        facts = msgspec.structs.replace(
            facts, pinned=model.status.resolved_revision, may_have_job=waits is None
        )
        taken += self._applier.apply(base(facts), live)
        accepted = taken_word(taken) or self._acceptance.judge(key, seen, facts, live)
        decided = plan.decision(
            seen,
            facts,
            may_move=accepted[0] == "True" and model.may_start,
            servable=self._probes.known(key).servable(),
            now=now,
            hopeless=model.hopeless,
        )
        taken = self._write(seen, facts, keys, decided, live, accepted)
        accepted = taken_word(taken) or accepted
        wait = self._question(key, seen, facts, decided, live)
        token = _canary_token(live, seen.owner) or ""
        picture = self._picture(key, seen, facts, accepted, model, decided, keys, now, token)
        self._say(seen, picture, live)
        return self._next_look(picture, keys, wait)

    def _all_read(self, key: Key, seen: Seen, live: Snapshot) -> bool:
        """Whether pods with older keys have the public keys of the newest generation."""
        newest = seen.status.keys.generation
        if seen.status.keys.read >= newest:
            self._keywatch.forget(key)
            return True
        older = [p for p in seen.pods if not p.deleting and (p.key_generation or newest) < newest]
        wanted = frozenset(f"{role}.{newest}" for role in Role)
        door = Door(probe_port(seen.spec, Role.DECODE), _canary_token(live, seen.owner) or "")
        return self._keywatch.all_read(key, older, wanted, door)

    def _facts(self, seen: Seen, live: Snapshot, keys: KeyPlan) -> tuple[Facts, list[Taken]]:
        """Facts, after making the keys that are missing; and names of Secrets that are taken."""
        known = may_speak(seen.held, seen.published, in_use=seen.in_use(), retired=keys.retired)
        facts = Facts(
            owner=seen.owner,
            spec=seen.spec,
            settings=self._settings,
            key_generation=keys.generation,
        )
        taken: list[Taken] = []
        for role in keys.missing:
            public, secret = (text.decode() for text in zmq.curve_keypair())
            there = self._applier.ensure(secrets.keys(facts, role, public, secret), live)
            if isinstance(there, Taken):
                taken.append(there)
            else:
                known[(role, keys.generation)] = secrets.public_of(there)
        token = secrets.canary_token(facts, randomness.token_urlsafe(32))
        taken += self._applier.create([token], live)
        publics = {f"{role}.{number}": public for (role, number), public in known.items()}
        return (
            msgspec.structs.replace(facts, key_generation=keys.active, publics=publics),
            taken,
        )

    def _write(
        self,
        seen: Seen,
        facts: Facts,
        keys: KeyPlan,
        decided: Decision,
        live: Snapshot,
        accepted: Word,
    ) -> list[Taken]:
        """Children as decided, and pods marked before their Deployments shrink; names that
        somebody else has. What is not accepted starts nothing, the model's Job included."""
        for mark in marks(seen.pods, seen.workloads, decided.counts, decided.admitted):
            body = {"metadata": {"annotations": mark.annotations}}
            self._cluster.patch("Pod", seen.owner.namespace, mark.pod, body)
        keep = plan.kept(decided.counts, seen, plan.remembered(decided))
        counts = {key: count for key, count in decided.counts.items() if key in keep}
        routers = plan.reachable_routers(decided)
        objects = desired(facts, counts, seen.templates, routers=routers)
        self._repairs.want((seen.owner.namespace, seen.owner.name), seen.owner.uid, objects)
        may_start = accepted[0] == "True"
        made = [each for each in objects.created if may_start or each["kind"] != "Job"]
        taken = self._applier.create(made, live)
        taken += self._applier.apply(objects.applied, live)
        names_kept = {(each["kind"], each["metadata"]["name"]) for each in objects.applied}
        names_kept |= {(each["kind"], each["metadata"]["name"]) for each in objects.created}
        names_kept |= self._secrets_kept(facts, keys)
        self._applier.prune(live, names_kept, seen.owner.uid)
        return taken

    def _secrets_kept(self, facts: Facts, keys: KeyPlan) -> set[tuple[str, str]]:
        generations = {keys.generation, keys.active}
        generations |= {int(name.rpartition(".")[2]) for name in facts.publics}
        kept = {("Secret", canary_secret(facts.owner))}
        for number in generations:
            at = msgspec.structs.replace(facts, key_generation=number)
            kept |= {("Secret", keys_secret(at, role)) for role in Role}
        return kept

    def _question(
        self, key: Key, seen: Seen, facts: Facts, decided: Decision, live: Snapshot
    ) -> float | None:
        """Ask canaries when there is somebody to ask; seconds until the next one."""
        token = _canary_token(live, seen.owner)
        if decided.phase is Phase.SUSPENDED or token is None:
            return None
        asked = plan.judged(decided)
        questions = [
            question
            for revisions in asked.values()
            if (question := self._asked(seen, revisions, token)) is not None
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
        token: str,
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
            refusals=self._refusals.known(key, seen.pods, token),
        )

    def _say(self, seen: Seen, picture: Picture, live: Snapshot) -> None:
        status = status_of(picture, seen.status)
        if status != seen.status:
            self._cluster.apply(_status_manifest(seen.owner, status), subresource="status")
            self._tell(seen.owner, seen.status.conditions, status.conditions, picture.now)
        for role in picture.wanted:
            self._say_scale(seen, live, role)

    def _say_scale(self, seen: Seen, live: Snapshot, role: Role) -> None:
        """What /scale shows of a role."""
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
        if scaler.get("status") != status:
            self._cluster.apply(manifest, subresource="status")

    def _refuse(
        self, owner: Identity, resource: Manifest, status: LLMServiceStatus, why: str
    ) -> None:
        """A spec that cannot be read: say so and touch nothing."""
        generation, now = resource["metadata"]["generation"], time.time()
        conditions = refused_conditions(status.conditions, why, generation, now)
        if conditions == status.conditions and status.observed_generation == generation:
            return
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
        asleep = picture.decision.phase is Phase.SUSPENDED
        if (
            not quiet
            or not (picture.model.ready or asleep)
            or any(not pod.ready for pod in picture.pods)
        ):
            waits.append(SOON)
        return min(waits, default=None)


def _canary_token(live: Snapshot, owner: Identity) -> str | None:
    """The token that canaries bring; None where its Secret is not there yet."""
    secret = live.find("Secret", canary_secret(owner))
    if secret is None:
        return None
    return base64.b64decode(secret["data"][names.CANARY_TOKEN_FILE]).decode()


def _status_manifest(owner: Identity, status: LLMServiceStatus) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "LLMService",
        "metadata": {"name": owner.name, "namespace": owner.namespace, "uid": owner.uid},
        "status": msgspec.to_builtins(status),
    }
