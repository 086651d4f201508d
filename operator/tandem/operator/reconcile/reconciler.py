"""One reconcile pass of one service: read everything, decide, write differences, report the status.

Nothing is remembered between passes except canaries' answers. A refused write holds back only the
writes that depend on it; its error is raised at the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

import msgspec

from tandem.operator import look
from tandem.operator.api.service import Unreadable, spec_of, status_of
from tandem.operator.api.status import Reason
from tandem.operator.cluster import Cluster
from tandem.operator.cluster.apply import Applier, Problem
from tandem.operator.cluster.client import Refused
from tandem.operator.cluster.gather import References, snapshot
from tandem.operator.cluster.repair import Repairs
from tandem.operator.cluster.store import Store
from tandem.operator.cluster.undeclared import Undeclared
from tandem.operator.decide import observe, plan
from tandem.operator.decide.keyring import KeyPlan, plan_keys
from tandem.operator.decide.modelcheck import ModelVerdict, judge, may_have_job
from tandem.operator.decide.observe import Snapshot, WorkloadView
from tandem.operator.decide.plan import Seen
from tandem.operator.decide.rollout import Decision, Phase, token_name
from tandem.operator.decide.scaling import is_full
from tandem.operator.decide.status import StatusInputs
from tandem.operator.decide.words import Word
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.fetching import job_revision
from tandem.operator.desired.naming import Identity, Manifest, map_of
from tandem.operator.desired.references import as_named_before
from tandem.operator.desired.router import url
from tandem.operator.desired.workload import RevisionKey
from tandem.operator.probes.keywatch import KeyWatch
from tandem.operator.probes.probing import Key, Known, Probes
from tandem.operator.probes.reach import Reach
from tandem.operator.probes.refusals import Refusals
from tandem.operator.reconcile.acceptance import Acceptance, problem_word
from tandem.operator.reconcile.canary_prober import CanaryProber, canary_token
from tandem.operator.reconcile.status_writer import StatusWriter
from tandem.operator.reconcile.writer import Writer
from tandem.operator.settings import OperatorSettings

SOON = 5.0
"""Seconds to the next pass during a change that no watch reports."""


def next_look(inputs: StatusInputs, keys: KeyPlan, wait: float | None) -> float | None:
    """Return the seconds until a change is possible that no watch reports."""
    waits = [wait] if wait is not None else []
    if keys.waits > 0:  # pods are asked from the next look on, without an event
        waits.append(min(keys.waits, SOON))
    quiet = inputs.decision.phase in (Phase.STABLE, Phase.SUSPENDED, Phase.PAUSED)
    asleep = inputs.decision.phase is Phase.SUSPENDED
    if (
        not quiet
        or inputs.accepted[0] != "True"  # names become free, quotas and references change
        or not (inputs.model.ready or asleep)
        or any(not pod.ready for pod in inputs.pods)
    ):
        waits.append(SOON)
    return min(waits, default=None)


Workloads = Mapping[RevisionKey, WorkloadView]


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """Another service of the namespace."""

    name: str
    created: str
    has_served: bool
    has_failed: bool
    """Whether it missed its deadline: others do not wait for it."""
    workloads: Workloads

    @property
    def turn(self) -> tuple[bool, str, str]:
        """Return the sort key of the service's turn."""
        return self.has_failed, self.created, self.name


def neighbour(resource: Manifest, workloads: Workloads) -> Neighbour | None:
    """Return the view of a service, or None without wanted pods."""
    metadata = resource["metadata"]
    if "deletionTimestamp" in metadata or map_of(resource.get("spec")).get("suspend"):
        return None
    rollout = map_of(map_of(resource.get("status")).get("rollout"))
    return Neighbour(
        name=metadata["name"],
        created=metadata["creationTimestamp"],
        has_served=bool(rollout.get("stable")),
        has_failed=bool(rollout.get("failed")),
        workloads=workloads,
    )


def goes_first(mine: Neighbour, others: Iterable[Neighbour]) -> str | None:
    """Return the name of the service that goes before ``mine``, or None."""
    if mine.has_served or _is_whole(mine):
        return None
    older = [
        each
        for each in others
        if each.turn < mine.turn
        and not each.has_served
        and not each.has_failed
        and lacks_room(each.workloads)
    ]
    return min(older, key=lambda each: each.turn).name if older else None


def lacks_room(workloads: Workloads) -> bool:
    """Return whether a quota refuses wanted pods."""
    return any(
        each.asked > each.existing and each.refused is not None and is_full(each.refused)
        for each in workloads.values()
    )


def _is_whole(service: Neighbour) -> bool:
    """Return whether all wanted pods exist, and some are wanted."""
    views = [each for each in service.workloads.values() if each.asked]
    return bool(views) and all(each.existing >= each.asked for each in views)


logger = logging.getLogger(__name__)

REFERENCE_SECONDS = 300.0
"""Minimum seconds for which Secrets and claims count as existing; at most twice as many."""


class Reconciler:
    """Reconciliation of services. Calls for one key must not overlap."""

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
        undeclared: Undeclared | None = None,
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
        self._canary_prober = CanaryProber(probes, keywatch)
        self._writer = Writer(cluster, applier, repairs)
        self._undeclared = undeclared or Undeclared()
        self._status_writer = StatusWriter(cluster, store, self._undeclared)
        self._uids: dict[Key, str] = {}
        """UIDs of the services of remembered values."""

    def __call__(self, key: Key) -> float | None:
        """Reconcile a service; return the seconds until the next pass, or None."""
        look.enter("observe")
        resource = self._store.find("LLMService", *key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._forget(key)
            return None
        look.saw(resource["metadata"]["generation"])
        owner = Identity(key[0], key[1], resource["metadata"]["uid"])
        if self._uids.setdefault(key, owner.uid) != owner.uid:  # made again, its end was missed
            self._forget(key)
            self._uids[key] = owner.uid
        status = status_of(resource)
        try:
            spec = spec_of(resource)
        except Unreadable as error:
            look.enter("tell")
            why: Word = ("False", Reason.INVALID_SPEC, str(error))
            generation = resource["metadata"]["generation"]
            self._status_writer.refuse(owner, generation, status, why)
            return 0.0 if self._status_writer.is_outdated(owner, generation) else None
        live = snapshot(self._store, owner, resource["metadata"]["creationTimestamp"])
        owner = as_named_before(owner, live.names("Secret"))
        seen = plan.see(owner, resource["metadata"]["generation"], spec, status, live)
        self._reach.look(owner, seen.pods)
        return self._bring(key, seen, live)

    def _forget(self, key: Key) -> None:
        """Drop all values of a deleted service."""
        self._uids.pop(key, None)
        self._probes.forget(key)
        self._repairs.forget(key)
        self._keywatch.forget(key)
        self._refusals.forget(key)
        self._reach.forget(key)
        self._acceptance.forget(key)
        self._references.forget(key)

    def _bring(self, key: Key, seen: Seen, live: Snapshot) -> float | None:
        """Read the remaining inputs, decide, write, ask pods, report."""
        now = time.time()
        token = canary_token(live, seen.owner)
        missing, unread = self._references.missing(key, seen.spec)
        problems: list[Problem] = [] if unread is None else [unread]

        look.enter("plan")
        keys = plan_keys(
            seen.held,
            seen.status.keys,
            rotation_id=seen.spec.security.key_rotation_id,
            in_use=seen.in_use(),
            needed=seen.needed(),
            now=now,
            publish_seconds=self._settings.key_publish_seconds,
            all_read=self._canary_prober.all_read(key, seen, token),
        )
        model, waits = self._judge_model(seen, missing, now)
        first = plan.facts(seen, self._settings, keys.generation, model, may_have_job=waits is None)

        look.enter("apply")
        publics, found = self._writer.secrets(first, keys.missing, live)
        facts = plan.facts_with_keys(first, seen, keys, publics)
        problems += found + self._writer.base(facts, live)
        if problems:
            keys = keys.held_back(seen.status.keys)

        look.enter("accept")
        accepted, untried = problem_word(problems), None
        if accepted is None:
            accepted, untried = self._acceptance.judge(key, seen, facts, live)
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
            gives_way=(first_of_all := self._goes_first(key, seen)) is not None,
        )
        if first_of_all is not None and accepted[0] == "True":
            text = f"the namespace's quota does not fit both: {first_of_all} starts first"
            accepted = "Unknown", Reason.QUOTA_EXCEEDED, text

        look.enter("apply")
        refused = self._writer.children(
            seen, facts, keys, decided, live, before=problems, may_start=may_start
        )
        if accepted[0] != "False":
            accepted = problem_word(refused) or accepted
        problems += [*([] if untried is None else [untried]), *refused]
        look.enter("ask")
        wait = self._canary_prober.canaries(key, seen, decided, live)
        outdated = self._undeclared.problem("LLMService")
        if accepted[0] == "True" and outdated is not None:
            accepted = accepted[0], accepted[1], f"{accepted[2]}; {outdated}"
        look.enter("tell")
        inputs = self._picture(
            key, seen, facts, accepted, model, decided, keys, known, now, token or ""
        )
        self._status_writer.write(seen, inputs, live)
        if self._status_writer.is_outdated(seen.owner, seen.generation, seen.scalers):
            return 0.0
        for each in problems:
            if isinstance(each, Refused):  # counted, traced, and retried with backoff
                raise each.error
        return next_look(inputs, keys, wait)

    def _goes_first(self, key: Key, seen: Seen) -> str | None:
        """Return the name of the service that comes up before this one, or None."""
        if seen.status.rollout.stable or seen.spec.suspend:
            return None
        mine, others = None, []
        for resource in self._store.all("LLMService"):
            namespace, name = resource["metadata"]["namespace"], resource["metadata"]["name"]
            if namespace != key[0]:
                continue
            items = self._store.children((namespace, name))
            views = observe.workloads(each for each in items if each["kind"] == "Deployment")
            found = neighbour(resource, views)
            if name == key[1]:
                mine = found
            elif found is not None:
                others.append(found)
        return None if mine is None else goes_first(mine, others)

    def _judge_model(
        self, seen: Seen, missing: str | None, now: float
    ) -> tuple[ModelVerdict, Reason | None]:
        """Return the verdict on the model, and why its Job waits."""
        waits = may_have_job(
            seen.job,
            suspended=bool(seen.spec.suspend),
            others=lambda: observe.unfinished(self._store.all("Job")),
            most=self._settings.model_jobs,
            made_of=job_revision(seen.spec, self._settings),
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
    ) -> StatusInputs:
        return StatusInputs(
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
