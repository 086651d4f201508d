"""One look at one service: read everything, decide, write what differs, say what is.

Level-triggered: nothing is remembered between two looks but answers of canaries, and every look
starts from what the API server told last, our own writes included: one that finds nothing to do
asks nobody. Called by the queue's threads; a ClusterError means that the queue tries again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tandem.operator import look
from tandem.operator.api import reading
from tandem.operator.api.conditions import Reason
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.apply import REFUSALS, Applier
from tandem.operator.cluster.gather import References, snapshot
from tandem.operator.cluster.repair import Repairs
from tandem.operator.cluster.store import Store
from tandem.operator.decide import observe, plan
from tandem.operator.decide.keyring import KeyPlan, plan_keys
from tandem.operator.decide.modelcheck import ModelVerdict, judge, may_have_job
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision, Phase, token_name
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.decide.status import Picture
from tandem.operator.decide.words import Word
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.fetching import job_revision
from tandem.operator.desired.naming import Identity, Role
from tandem.operator.desired.router import url
from tandem.operator.probes.keywatch import KeyWatch
from tandem.operator.probes.probing import Key, Known, Probes
from tandem.operator.probes.reach import Reach
from tandem.operator.probes.refusals import Refusals
from tandem.operator.reconcile.acceptance import Acceptance, refusal, taken_word
from tandem.operator.reconcile.asker import Asker, canary_token
from tandem.operator.reconcile.teller import Teller
from tandem.operator.reconcile.writer import Writer
from tandem.operator.settings import OperatorSettings

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
        self._store = store
        self._references = References(cluster, REFERENCE_SECONDS)
        self._settings = settings
        self._probes = probes
        self._repairs = repairs
        self._keywatch = keywatch
        self._refusals = refusals
        self._reach = reach
        self._acceptance = Acceptance(cluster, applier)
        self._asker = Asker(probes, keywatch)
        self._writer = Writer(cluster, applier, repairs)
        self._teller = Teller(cluster)
        self._uids: dict[Key, str] = {}
        """Whom what is remembered is about."""

    def __call__(self, key: Key) -> float | None:
        """Look at a service; seconds until it should be looked at again, None for no hurry."""
        look.enter("observe")
        resource = self._store.find("LLMService", *key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._forget(key)
            return None
        look.saw(resource["metadata"]["generation"])
        owner = Identity(key[0], key[1], resource["metadata"]["uid"])
        if self._uids.setdefault(key, owner.uid) != owner.uid:  # made again, its end unseen
            self._forget(key)
            self._uids[key] = owner.uid
        status = reading.status_of(resource)
        try:
            spec = reading.spec_of(resource)
        except reading.Unreadable as error:
            look.enter("tell")
            why: Word = ("False", Reason.INVALID_SPEC, str(error))
            generation = resource["metadata"]["generation"]
            self._teller.refuse(owner, generation, status, why)
            return 0.0 if self._is_outdated(owner, generation) else None
        live = snapshot(self._store, owner, resource["metadata"]["creationTimestamp"])
        seen = plan.see(owner, resource["metadata"]["generation"], spec, status, live)
        self._reach.look(owner, seen.pods)
        return self._bring(key, seen, live)

    def _forget(self, key: Key) -> None:
        """The service is gone: nothing of it counts for another of its name."""
        self._uids.pop(key, None)
        self._probes.forget(key)
        self._repairs.forget(key)
        self._keywatch.forget(key)
        self._refusals.forget(key)
        self._reach.forget(key)
        self._acceptance.forget(key)
        self._references.forget(key)

    def _bring(self, key: Key, seen: Seen, live: Snapshot) -> float | None:
        """Read what else there is to know, decide, write, ask, tell."""
        now = time.time()
        token = canary_token(live, seen.owner)
        missing = self._references.missing(key, seen.spec)

        look.enter("plan")
        keys = plan_keys(
            seen.held,
            seen.status.keys,
            rotation_id=seen.spec.security.key_rotation_id,
            in_use=seen.in_use(),
            needed=seen.needed(),
            now=now,
            publish_seconds=self._settings.key_publish_seconds,
            all_read=self._asker.all_read(key, seen, token),
        )
        model, waits = self._judge_model(seen, missing, now)
        first = plan.facts(seen, self._settings, keys.generation, model, may_have_job=waits is None)

        look.enter("apply")
        with self._told(seen):
            publics, taken = self._writer.secrets(first, keys.missing, live)
            if not publics.keys() >= set(keys.missing):
                keys = keys.held_back(seen.status.keys)
            facts = plan.facts_with_keys(first, seen, keys, publics)
            taken += self._writer.base(facts, live)

        look.enter("accept")
        accepted = taken_word(taken) or self._acceptance.judge(key, seen, facts, live)
        look.enter("plan")
        known = self._probes.as_of_now(key)
        may_start = accepted[0] == "True"
        decided = plan.decision(
            seen,
            facts,
            may_move=may_start and model.may_start,
            servable=known.servable(),
            now=now,
            non_retryable=model.non_retryable,
        )

        look.enter("apply")
        with self._told(seen):
            taken = self._writer.children(seen, facts, keys, decided, live, may_start=may_start)
        accepted = taken_word(taken) or accepted
        look.enter("ask")
        wait = self._asker.canaries(key, seen, decided, token)
        look.enter("tell")
        picture = self._picture(
            key, seen, facts, accepted, model, decided, keys, known, now, token or ""
        )
        self._teller.say(seen, picture, live)
        if self._is_outdated(seen.owner, seen.generation, seen.scalers):
            return 0.0
        return _next_look(picture, keys, wait)

    def _is_outdated(
        self, owner: Identity, generation: int, scalers: Mapping[Role, int] | None = None
    ) -> bool:
        """Whether the answer to what was told brought a spec, or a scaler's word, that the look did
        not know: its own event is older than that answer, and will be no news."""
        there = self._store.find("LLMService", owner.namespace, owner.name)
        if there is None or there["metadata"]["generation"] != generation:
            return there is not None
        for role, replicas in (scalers or {}).items():
            scaler = self._store.find("LLMRoleScaler", owner.namespace, owner.child(role))
            if scaler is not None and scaler["spec"]["replicas"] != replicas:
                return True
        return False

    @contextmanager
    def _told(self, seen: Seen) -> Iterator[None]:
        """Children are written: what the API server refuses is said before the look fails, since
        who may read the status may not read our log."""
        try:
            yield
        except ClusterError as error:
            if error.status in REFUSALS:
                reason = refusal(error.message, Reason.CHILD_REFUSED)
                why: Word = ("False", reason, error.message)
                self._teller.refuse(seen.owner, seen.generation, seen.status, why)
            raise

    def _judge_model(
        self, seen: Seen, missing: str | None, now: float
    ) -> tuple[ModelVerdict, Reason | None]:
        """How far the model is, and what its Job waits for."""
        waits = may_have_job(
            seen.job,
            suspended=bool(seen.spec.suspend),
            others=lambda: observe.unfinished(self._store.all("Job")),
            most=self._settings.model_jobs,
            made_of=job_revision(seen.spec),
        )
        verdict = judge(
            seen.spec,
            seen.job,
            seen.status.model,
            missing,
            waits=waits,
            now=now,
            patience=self._settings.unschedulable_seconds,
        )
        return verdict, waits

    def _picture(
        self,
        key: Key,
        seen: Seen,
        facts: Facts,
        accepted: Word,
        model: ModelVerdict,
        decided: Decision,
        keys: KeyPlan,
        known: Known,
        now: float,
        token: str,
    ) -> Picture:
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


def _next_look(picture: Picture, keys: KeyPlan, wait: float | None) -> float | None:
    """Seconds until something may have changed of which no watch tells."""
    waits = [wait] if wait is not None else []
    if keys.waits > 0:
        waits.append(keys.waits)
    quiet = picture.decision.phase in (Phase.STABLE, Phase.SUSPENDED, Phase.PAUSED)
    asleep = picture.decision.phase is Phase.SUSPENDED
    if (
        not quiet
        or picture.accepted[0] != "True"  # names get free, quotas and references come
        or not (picture.model.ready or asleep)
        or any(not pod.ready for pod in picture.pods)
    ):
        waits.append(SOON)
    return min(waits, default=None)
