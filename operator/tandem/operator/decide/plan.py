"""Decisions of a reconciliation from the objects that were read, without requests."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import (
    ConditionType,
    LLMServiceStatus,
    Reason,
    RolloutStatus,
)
from tandem.operator.decide import observe
from tandem.operator.decide.answered import RevisionView, RoleView, RolloutView
from tandem.operator.decide.keyring import KeyPlan, may_speak
from tandem.operator.decide.modelcheck import ModelVerdict
from tandem.operator.decide.observe import Snapshot
from tandem.operator.decide.rollout import (
    Decision,
    Phase,
    decide,
    token_name,
    token_of,
)
from tandem.operator.decide.scaling import Wanted, gives_back, wanted
from tandem.operator.decide.words import Word, condition_of
from tandem.operator.desired.capability import unsupported
from tandem.operator.desired.compose import target_revisions
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.merge import TemplateUnreadable
from tandem.operator.desired.model import job_name
from tandem.operator.desired.naming import (
    WORKERS,
    Identity,
    Manifest,
    Role,
)
from tandem.operator.desired.policy import PROGRESS_DEADLINE, is_external, max_unavailable
from tandem.operator.desired.protect import TemplateConflict
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.workload import RevisionKey, rendered
from tandem.operator.settings import OperatorSettings
from tandem.protocol.card import WIRE
from tandem.protocol.names import ANNOTATION_DRAINING, ANNOTATION_WIRE


def moved_roles(facts: Facts, templates: Mapping[RevisionKey, Manifest]) -> frozenset[Role]:
    """Return the roles that roll only because another one does; ``facts`` have none.

    Their stored template is of another wire. If all roles stay, none moves.
    """
    moved = msgspec.structs.replace(facts, moved=frozenset(Role))
    stays, rolls, has_rolled = set(), set(), set()
    for role in Role:
        template = templates.get((role, facts.revision(role)))
        if template is not None and wire_of(template) != WIRE:
            stays.add(role)
        elif template is None and (role, moved.revision(role)) in templates:
            has_rolled.add(role)
        else:
            rolls.add(role)
    if not rolls and not has_rolled:
        return frozenset()
    return frozenset(has_rolled | {role for role in stays if not _is_pinned(facts, role)})


def _is_pinned(facts: Facts, role: Role) -> bool:
    """Return whether a role's image is the user's, so that new pods have the same version."""
    return role in WORKERS and facts.spec.image is not None


def wire_of(template: Manifest) -> str | None:
    """Return the wire of a template's pods, None from earlier releases."""
    annotations = template.get("metadata", {}).get("annotations") or {}
    found: str | None = annotations.get(ANNOTATION_WIRE)
    return found


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Service and its children, as values."""

    owner: Identity
    spec: LLMServiceSpec
    status: LLMServiceStatus
    generation: int
    pods: list[observe.PodView]
    workloads: dict[RevisionKey, observe.WorkloadView]
    templates: dict[RevisionKey, Manifest]
    held: dict[tuple[Role, int], str]
    """Public keys of existing Secrets."""
    published: dict[tuple[Role, int], str]
    """Public keys that pods get."""
    job: observe.JobView | None
    scalers: dict[Role, int]

    def in_use(self) -> list[int]:
        found = {pod.key_generation for pod in self.pods}
        return sorted(number for number in found if number is not None)

    def needed(self) -> set[int]:
        """Return the key generations of templates that the rollout remembers."""
        names = _remembered(self.status.rollout) & self.templates.keys()
        found = {observe.generation_of(self.templates[name]) for name in names}
        return {number for number in found if number is not None}


def see(
    owner: Identity, generation: int, spec: LLMServiceSpec, status: LLMServiceStatus, live: Snapshot
) -> Seen:
    """Return the values of a snapshot."""
    pods = list(live.of("Pod"))
    job = live.find("Job", job_name(owner, spec.model.digest))
    return Seen(
        owner=owner,
        spec=spec,
        status=status,
        generation=generation,
        pods=observe.pods(pods),
        workloads=observe.workloads(live.of("Deployment")),
        templates={
            **observe.templates_of_deployments(live.of("Deployment")),  # if a stored one is lost
            **observe.templates(live.of("ControllerRevision")),
        },
        held=observe.held_keys(live.of("Secret")),
        published=observe.published_keys(live.find("ConfigMap", owner.child("peers"))),
        job=observe.job(job, pods),
        scalers=_scalers(live),
    )


def _scalers(live: Snapshot) -> dict[Role, int]:
    return {
        Role(item["spec"]["role"].lower()): item["spec"]["replicas"]
        for item in live.of("LLMRoleScaler")
    }


def accepted(facts: Facts) -> Word:
    """Return the Accepted condition, as far as it is known without the API server."""
    problem = unsupported(facts.spec)
    if problem is not None:
        return "False", Reason.UNSUPPORTED, problem
    try:
        for role in Role:
            rendered(facts, role)
    except TemplateConflict as error:
        return "False", Reason.POD_TEMPLATE_CONFLICT, str(error)
    except TemplateUnreadable as error:
        return "False", Reason.INVALID_SPEC, str(error)
    return "True", Reason.ACCEPTED, "the resource is understood"


def facts(
    seen: Seen,
    settings: OperatorSettings,
    key_generation: int,
    model: ModelVerdict,
    *,
    may_have_job: bool,
) -> Facts:
    """Return the inputs of the builders before any key is published, and without moved roles."""
    return Facts(
        owner=seen.owner,
        spec=seen.spec,
        settings=settings,
        key_generation=key_generation,
        pinned=model.status.resolved_revision,
        may_have_job=may_have_job,
        last_counts=last_counts(seen),
        kept={
            role: [template for (its, _), template in sorted(seen.templates.items()) if its is role]
            for role in Role
        },
    )


def facts_with_keys(before: Facts, seen: Seen, keys: KeyPlan, made: Mapping[Role, str]) -> Facts:
    """Return the facts with the active generation, all public keys, and the moved roles.

    ``made`` are keys of the new generation.
    """
    known = may_speak(seen.held, seen.published, in_use=seen.in_use(), retired=keys.retired)
    known |= {(role, keys.generation): public for role, public in made.items()}
    publics = {f"{role}.{number}": public for (role, number), public in known.items()}
    facts = msgspec.structs.replace(before, key_generation=keys.active, publics=publics)
    moved = moved_roles(facts, seen.templates)
    return msgspec.structs.replace(facts, moved=moved) if moved else facts


def replicas(seen: Seen) -> dict[Role, Wanted]:
    """Return the wanted replicas by role."""
    return {role: wanted(seen.spec, role, last_counts(seen) | seen.scalers) for role in Role}


def last_counts(seen: Seen) -> dict[Role, int]:
    """Return the last replicas of roles with a scaler, for the time without it."""
    replicas = {each.role: each.replicas for each in seen.status.scalers}
    counts = {}
    for role in WORKERS:
        asked = sum(view.asked for (its, _), view in seen.workloads.items() if its is role)
        count = replicas.get(role)
        if is_external(seen.spec, role) and (count is not None or asked):
            counts[role] = asked if count is None else count
    return counts


def decision(
    seen: Seen,
    facts: Facts,
    *,
    may_move: bool,
    servable: Set[str],
    now: float,
    non_retryable: bool = False,
    gives_way: bool = False,
) -> Decision:
    """Return the counts by role and revision.

    Without ``may_move`` the targets stay. ``non_retryable`` targets are replaced by stable
    revisions. ``servable`` names revisions with a successful canary.
    """
    memory = _tried_anew(seen)
    targets = target_revisions(facts)
    if not may_move:
        targets = {Role(role): name for role, name in memory.targets.items()}
    if not targets:
        phase = Phase.SUSPENDED if seen.spec.suspend else Phase.FIRST
        return Decision(phase=phase, counts={}, memory=memory, admitted=set())
    spec, want = seen.spec, replicas(seen)
    view = RolloutView(
        roles={
            role: RoleView(
                desired=want[role].replicas,
                target=target,
                revisions=_revisions(seen, role, now, facts.settings.unschedulable_seconds),
                max_unavailable=max_unavailable(spec, role),
            )
            for role, target in targets.items()
        },
        memory=memory,
        now=now,
        suspended=bool(spec.suspend),
        gives_way=gives_way,
        non_retryable=non_retryable,
        paused=bool(spec.rollout.paused),
        deadline=float(spec.rollout.progress_deadline_seconds or PROGRESS_DEADLINE),
    )
    if spec.rollout.surge is not None:
        view = msgspec.structs.replace(view, surge=spec.rollout.surge)
    return decide(msgspec.structs.replace(view, canary_ok=token_of(view) in servable))


def _tried_anew(seen: Seen) -> RolloutStatus:
    """Return the memory, with a new deadline for incomplete targets if the spec changed.

    Targets that were made and did not serve stay failed.
    """
    memory = seen.status.rollout
    targets = {(Role(role), name) for role, name in memory.targets.items()}
    if seen.generation == seen.status.observed_generation or targets <= seen.workloads.keys():
        return memory
    accepted = condition_of(seen.status.conditions, ConditionType.ACCEPTED)
    if memory.failed is None and (accepted is None or accepted.status == "True"):
        return memory  # in progress: a role that waits has no Deployment yet
    return msgspec.structs.replace(memory, failed=None, progressed_at=None)


def _revisions(seen: Seen, role: Role, now: float, patience: float) -> dict[str, RevisionView]:
    views = {}
    for (its_role, revision), workload in seen.workloads.items():
        if its_role is not role:
            continue
        mine = [pod for pod in seen.pods if (pod.role, pod.revision) == (role, revision)]
        stuck = [pod.pending_since for pod in mine if not pod.deleting]
        views[revision] = RevisionView(
            asked=workload.asked,
            present=len(mine),
            ready=min(workload.asked, sum(map(_stays_ready, mine))),
            unschedulable=any(_is_long(since, now, patience) for since in stuck),
            full=_is_long(workload.full_since, now, patience),
            overdrawn=workload.refused is not None and not gives_back(workload.refused),
        )
    return views


def _stays_ready(pod: observe.PodView) -> bool:
    """Return whether a pod continues to serve."""
    return pod.ready and not pod.deleting and pod.annotations.get(ANNOTATION_DRAINING) != "true"


def _is_long(since: float | None, now: float, patience: float) -> bool:
    return since is not None and now - since >= patience


def kept(
    wanted_now: Mapping[RevisionKey, int], seen: Seen, memory_names: set[RevisionKey]
) -> set[RevisionKey]:
    """Return the revisions whose Deployment and template stay: wanted, remembered, or with pods."""
    left = {(pod.role, pod.revision) for pod in seen.pods}
    return {key for key, count in wanted_now.items() if count > 0} | left | memory_names


def remembered(decided: Decision) -> set[RevisionKey]:
    """Return the revisions that a rollout may require again."""
    return _remembered(decided.memory)


def _remembered(memory: RolloutStatus) -> set[RevisionKey]:
    sets = [memory.targets, memory.stable, *memory.served]
    return {(Role(role), name) for each in sets for role, name in each.items()}


def judged(decided: Decision) -> dict[str, dict[Role, str]]:
    """Return the sets of revisions that canaries check, by name."""
    memory = decided.memory
    given_up = decided.phase is Phase.FAILED and bool(memory.stable)
    sets = [memory.stable] if given_up else [memory.targets, memory.stable]
    return {
        service_revision(each): {Role(role): name for role, name in each.items()}
        for each in [*sets, decided.met]
        if each
    }


def serving(decided: Decision) -> str:
    """Return the name of the revisions that clients reach."""
    memory = decided.memory
    if decided.met:
        return service_revision(decided.met)
    targets = token_name(memory)
    opened = memory.servable == targets and decided.phase is not Phase.FAILED
    return targets if opened or not memory.stable else service_revision(memory.stable)
