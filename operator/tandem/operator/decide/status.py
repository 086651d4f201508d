"""The status of a service: conditions with reasons, counts, columns.

A condition's transition time changes only with its status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import (
    ConditionType,
    Keys,
    Links,
    LLMServiceStatus,
    Reason,
    Revisions,
    RoleStatus,
    ScalerStatus,
    Summary,
)
from tandem.operator.api.transfer import NodeLocalMode
from tandem.operator.decide.modelcheck import ModelVerdict
from tandem.operator.decide.observe import PodView, Problem, WorkloadView
from tandem.operator.decide.rollout import Decision, Phase, token_name
from tandem.operator.decide.scaling import Wanted, scaling_word
from tandem.operator.decide.words import Truth, Verdict, Word, condition_of, conditions_of
from tandem.operator.desired.naming import WORKERS, Identity, Role
from tandem.operator.desired.policy import (
    answering_role,
    draws_tokens,
    is_external,
    node_local_volume,
)
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.workload import RevisionKey


class StatusInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a status."""

    owner: Identity
    spec: LLMServiceSpec
    generation: int
    url: str
    accepted: Word
    model: ModelVerdict
    decision: Decision
    wanted: dict[Role, Wanted]
    pods: list[PodView]
    workloads: dict[RevisionKey, WorkloadView]
    keys: Keys
    key_wait: float
    canary: Verdict | None
    """Verdict on the serving revisions."""
    pilot: Verdict | None
    """Verdict on the target revisions."""
    links: Links | None
    now: float
    unschedulable_seconds: float
    refusals: dict[str, Problem] = {}
    """Reported reasons of routers that are not ready, by the pod's UID."""

    def ready(self, role: Role, revision: str | None = None) -> int:
        """Return the ready pods of a role that stay."""
        return sum(
            pod.ready and not pod.deleting
            for pod in self.pods
            if pod.role is role and revision in (None, pod.revision)
        )

    def reached(self, role: Role) -> int:
        """Return the ready pods that clients reach."""
        return self.ready(role, self.decision.routers if role is Role.ROUTER else None)

    def counted(self, links: Links | None) -> Links | None:
        """Return ``links`` if it counts the current pairs of workers, else None.

        Without a pair, return no links: no router is asked then.
        """
        asleep = self.decision.phase is Phase.SUSPENDED
        pairs = 0 if asleep else self.ready(Role.PREFILL) * self.ready(Role.DECODE)
        if links is None or links.total == pairs:
            return links
        return None if pairs else Links(healthy=0, total=0)


ROLE_CONDITIONS = {
    Role.PREFILL: ConditionType.PREFILL_READY,
    Role.DECODE: ConditionType.DECODE_READY,
    Role.ROUTER: ConditionType.ROUTER_READY,
}


def next_status(inputs: StatusInputs, before: LLMServiceStatus) -> LLMServiceStatus:
    """Return the status to show."""
    words = _words(inputs, before)
    targets = {str(role): name for role, name in _targets(inputs).items()}
    stable = inputs.decision.memory.stable
    return LLMServiceStatus(
        observed_generation=inputs.generation,
        url=inputs.url,
        mode=_mode(inputs),
        summary=_summary(inputs),
        model=inputs.model.status,
        revisions=Revisions(
            current=_current(inputs),
            updated=service_revision(targets),
            stable=service_revision(stable) if stable else None,
        ),
        roles=_roles(inputs),
        rollout=inputs.decision.memory,
        links=inputs.counted(inputs.links or before.links),
        scalers=[
            ScalerStatus(
                role=role, name=inputs.owner.child(role), replicas=inputs.wanted[role].replicas
            )
            for role in WORKERS
            if is_external(inputs.spec, role)
        ],
        keys=inputs.keys,
        conditions=conditions_of(
            words, before.conditions, generation=inputs.generation, now=inputs.now
        ),
    )


def _mode(inputs: StatusInputs) -> Literal["Disaggregated", "Aggregated", "Pooling"] | None:
    """Return the current way to compute prompts; None if there is none."""
    if not (inputs.reached(Role.ROUTER) and inputs.ready(answering_role(inputs.spec))):
        return None
    if not draws_tokens(inputs.spec):
        return "Pooling"
    verdict, links = inputs.canary, inputs.counted(inputs.links)
    fell_back = verdict is not None and verdict.reason is Reason.CANARY_NOT_DISAGGREGATED
    cut_off = links is not None and links.total > 0 and links.healthy == 0
    alone = inputs.ready(Role.PREFILL) == 0 or inputs.wanted[Role.PREFILL].replicas == 0
    return "Aggregated" if alone or fell_back or cut_off else "Disaggregated"


def _targets(inputs: StatusInputs) -> dict[Role, str]:
    return {Role(role): name for role, name in inputs.decision.memory.targets.items()}


def _current(inputs: StatusInputs) -> str:
    most: dict[str, str] = {}
    for role, target in _targets(inputs).items():
        seen = {key: view for key, view in inputs.workloads.items() if key[0] is role}
        best = max(seen, key=lambda key: seen[key].existing, default=(role, target))
        most[role] = best[1]
    return service_revision(most)


def _summary(inputs: StatusInputs) -> Summary:
    def short(role: Role) -> str:
        return f"{inputs.reached(role)}/{inputs.wanted[role].replicas}"

    links = inputs.counted(inputs.links)
    return Summary(
        prefill=short(Role.PREFILL),
        decode=short(Role.DECODE),
        router=short(Role.ROUTER),
        links="-" if links is None else f"{links.healthy}/{links.total}",
    )


def _roles(inputs: StatusInputs) -> list[RoleStatus]:
    rows = []
    for (role, revision), view in sorted(inputs.workloads.items()):
        mine = [pod for pod in inputs.pods if (pod.role, pod.revision) == (role, revision)]
        rows.append(
            RoleStatus(
                name=role,
                revision=revision,
                desired=inputs.decision.counts.get((role, revision), 0),
                ready=inputs.ready(role, revision),
                updated=view.existing,
                draining=sum(pod.deleting for pod in mine),
                workload_ref=view.name,
            )
        )
    return rows[:32]


def _words(inputs: StatusInputs, before: LLMServiceStatus) -> dict[ConditionType, Word]:
    model = inputs.model
    words: dict[ConditionType, Word] = {
        ConditionType.ACCEPTED: inputs.accepted,
        ConditionType.MODEL_READY: (_truth(model.ready), model.reason, model.message),
    }
    for role, condition in ROLE_CONDITIONS.items():
        words[condition] = _role_word(inputs, role)
    words[ConditionType.KV_FABRIC_READY] = _fabric_word(inputs)
    words[ConditionType.SERVABLE] = _servable_word(inputs, before)
    words[ConditionType.PROGRESSING] = _progress_word(inputs, before)
    words[ConditionType.SCALING_ACTIVE] = scaling_word(inputs.spec, inputs.wanted)
    words[ConditionType.DEGRADED] = _degraded_word(inputs, before)
    words[ConditionType.READY] = _ready_word(inputs, words)
    return words


def _truth(value: bool) -> Truth:
    return "True" if value else "False"


def _role_word(inputs: StatusInputs, role: Role) -> Word:
    wanted, ready = inputs.wanted[role].replicas, inputs.reached(role)
    if inputs.decision.phase is Phase.SUSPENDED:
        return "False", Reason.SUSPENDED, "the service is suspended"
    if wanted == 0:
        return "True", Reason.NOT_NEEDED, "no replica is requested"
    text = f"{ready} of {wanted} ready"
    if ready >= wanted:
        return "True", Reason.REPLICAS_READY, text
    problem = role_problem(inputs, role)
    if problem is None:
        return "False", Reason.STARTING, text + _starting_text(inputs, role)
    return "False", problem.reason, f"{text}; {problem.message}"


def _starting_text(inputs: StatusInputs, role: Role) -> str:
    """Return the report of a pod that is not ready, if it has one."""
    for pod in inputs.pods:
        if pod.role is role and not pod.ready and not pod.deleting and pod.uid in inputs.refusals:
            return f"; {pod.name}: {inputs.refusals[pod.uid].message}"
    return ""


def role_problem(inputs: StatusInputs, role: Role, revision: str | None = None) -> Problem | None:
    """Return the first lasting problem of a role's pods, of one revision or any."""
    for (key, name), view in sorted(inputs.workloads.items()):
        if key is role and revision in (None, name) and view.refused is not None:
            return Problem(Reason.POD_REFUSED, view.refused)
    for pod in sorted(inputs.pods, key=lambda each: each.created):
        if pod.role is not role or revision not in (None, pod.revision):
            continue
        if pod.ready or pod.deleting:
            continue
        refusal = inputs.refusals.get(pod.uid)
        if pod.problem is None and refusal is not None and refusal.reason is not Reason.STARTING:
            return Problem(refusal.reason, f"{pod.name}: {refusal.message}")
        if pod.problem is None:
            continue
        since = pod.pending_since
        if since is not None and inputs.now - since < inputs.unschedulable_seconds:
            continue
        return Problem(pod.problem.reason, f"{pod.name}: {pod.problem.message}")
    return None


def _fabric_word(inputs: StatusInputs) -> Word:
    local = inputs.spec.kv_transfer.node_local
    has_tokens = draws_tokens(inputs.spec)
    if not has_tokens or inputs.wanted[Role.PREFILL].replicas == 0:
        why = "aggregated serving" if has_tokens else "the task generates no tokens"
        return "True", Reason.NOT_NEEDED, f"{why}: there are no hand-offs"
    if local.mode is NodeLocalMode.REQUIRED and node_local_volume(inputs.spec) is None:
        text = "spec.kvTransfer.nodeLocal.mode is Required, and nodeLocal.volume is not set"
        return "False", Reason.NODE_LOCAL_UNAVAILABLE, text
    links = inputs.counted(inputs.links)
    if links is None:
        text = "no router has reported the links of the workers that are ready yet"
        return "Unknown", Reason.LINKS_UNKNOWN, text
    if links.total == 0:
        text = "there is no link: prefill and decode workers are not ready at the same time"
        return "Unknown", Reason.LINKS_UNKNOWN, text
    text = f"{links.healthy} of {links.total} links up"
    if node_local_volume(inputs.spec) is not None:
        text += "; the node's folder is mounted in every worker"
    if links.healthy >= links.total:
        return "True", Reason.LINKS_UP, text
    for state, listed in (("quarantined", links.quarantined), ("down", links.down)):
        text += f"; {state}: {'; '.join(listed)}" if listed else ""
    return "False", Reason.LINKS_DOWN, text


def _servable_word(inputs: StatusInputs, before: LLMServiceStatus) -> Word:
    verdict = inputs.canary
    if inputs.decision.phase is Phase.SUSPENDED:
        return "False", Reason.SUSPENDED, "the service is suspended"
    if verdict is not None and verdict.reason is not Reason.CANARY_QUEUED:
        return _truth(verdict.ok), verdict.reason, verdict.message
    for each in before.conditions:  # of another leader: it holds until this one has asked
        is_known = each.type == ConditionType.SERVABLE and each.reason != Reason.SUSPENDED
        if is_known and inputs.decision.memory.stable:
            return each.status, Reason(each.reason), each.message or ""
    if verdict is not None:
        return "Unknown", verdict.reason, verdict.message
    return "Unknown", Reason.CANARY_PENDING, "no canary request has been sent"


def _blocked_word(inputs: StatusInputs) -> Word | None:
    """Return the problem that a person must fix first, or None."""
    if inputs.decision.phase is Phase.SUSPENDED:
        return None
    if inputs.accepted[0] == "False":
        return inputs.accepted
    model = inputs.model
    return ("False", model.reason, model.message) if model.non_retryable else None


def _progress_word(inputs: StatusInputs, before: LLMServiceStatus) -> Word:
    decision, blocked = inputs.decision, _blocked_word(inputs)
    if blocked is not None:
        return "False", blocked[1], f"the rollout is blocked: {blocked[2]}"
    if inputs.key_wait > 0:
        text = "new keys are published; pods roll when every pod has read them"
        return "True", Reason.WAITING_FOR_KEYS, text
    if decision.phase is Phase.PAUSED:
        return "False", Reason.PAUSED, "the rollout is paused"
    if decision.phase is Phase.FAILED:
        return "False", Reason.DEADLINE_EXCEEDED, _failed_text(inputs, before)
    if not inputs.model.may_start and decision.phase is not Phase.SUSPENDED:
        return "True", inputs.model.reason, inputs.model.message
    if decision.phase in (Phase.STABLE, Phase.SUSPENDED):
        return "False", Reason.STABLE, "no rollout"
    steps = ", ".join(
        f"{role} {inputs.ready(role, target)}/{inputs.wanted[role].replicas}"
        for role, target in sorted(_targets(inputs).items())
    )
    place = " in place" if decision.memory.in_place else ""
    text = f"{decision.phase}{place}: new revision has {steps}"
    if inputs.pilot is not None and not inputs.pilot.ok and decision.phase is Phase.PILOT:
        text += f"; its canary: {inputs.pilot.message}"
    for role, target in sorted(_targets(inputs).items()):
        problem = role_problem(inputs, role, target)
        if problem is not None:
            text += f"; {role}: {problem.message}"
    return "True", Reason.IN_PLACE_GAP if decision.gap else Reason.ROLLING_OUT, text


def _failed_text(inputs: StatusInputs, before: LLMServiceStatus) -> str:
    """Return the message of a rollout that was rolled back.

    After its pods are deleted, the message of the last status is kept.
    """
    memory, pilot = inputs.decision.memory, inputs.pilot
    degraded = condition_of(before.conditions, ConditionType.DEGRADED)
    gone = bool(memory.stable) and before.rollout.failed == memory.failed
    if gone and degraded is not None and degraded.reason == Reason.DEADLINE_EXCEEDED:
        return degraded.message
    targets = _targets(inputs)
    found = [role_problem(inputs, role, targets.get(role)) for role in Role]
    why = [problem.message for problem in found if problem is not None]
    text = f"revision {token_name(memory)} did not become servable in time"
    if pilot is not None and not pilot.ok:
        text += f" ({pilot.message})"
    if why:
        text += f": {why[0]}"
    if memory.stable:
        text += "; the stable revision has its replicas again"
    return text


def _degraded_word(inputs: StatusInputs, before: LLMServiceStatus) -> Word:
    decision, blocked = inputs.decision, _blocked_word(inputs)
    if blocked is not None:
        kept = "; what was there before is kept" if decision.memory.stable else ""
        return "True", blocked[1], f"the spec cannot be brought up: {blocked[2]}{kept}"
    if decision.phase is Phase.FAILED:
        return "True", Reason.DEADLINE_EXCEEDED, _failed_text(inputs, before)
    return _missing_word(inputs) or (
        "False",
        Reason.HEALTHY,
        "all requested replicas serve",
    )


def _missing_word(inputs: StatusInputs) -> Word | None:
    """Return what should serve and does not, if that lasts, or None."""
    phase = inputs.decision.phase
    if phase is Phase.SUSPENDED:
        return None
    settled = phase in (Phase.STABLE, Phase.PAUSED)
    if phase in (Phase.STABLE, Phase.FIRST, Phase.PAUSED):
        for role in Role:
            wanted, ready = inputs.wanted[role].replicas, inputs.reached(role)
            problem = role_problem(inputs, role)
            if ready < wanted and problem is not None:
                return (
                    "True",
                    problem.reason,
                    f"{role}: {ready} of {wanted} ready; {problem.message}",
                )
            if ready < wanted and settled:
                return "True", Reason.FEWER_REPLICAS, f"{role}: {ready} of {wanted} ready"
    verdict = inputs.canary
    if verdict is not None and not verdict.ok and verdict.reason is not Reason.CANARY_QUEUED:
        return "True", verdict.reason, verdict.message
    fabric = _fabric_word(inputs)
    return ("True", fabric[1], fabric[2]) if settled and fabric[0] == "False" else None


def _ready_word(inputs: StatusInputs, words: Mapping[ConditionType, Word]) -> Word:
    serving = all(inputs.reached(role) for role in (Role.ROUTER, answering_role(inputs.spec)))
    if serving and words[ConditionType.SERVABLE][0] == "True":
        return "True", Reason.READY, f"serving at {inputs.url}"
    order: Iterable[ConditionType] = (
        ConditionType.ACCEPTED,
        ConditionType.MODEL_READY,
        ConditionType.ROUTER_READY,
        ConditionType.PREFILL_READY,
        ConditionType.DECODE_READY,
        ConditionType.SERVABLE,
    )
    waiting = {Reason.STARTING, Reason.CHECKING, Reason.CANARY_PENDING, Reason.CANARY_QUEUED}
    missing = [words[kind] for kind in order if words[kind][0] != "True"]
    serious = [word for word in missing if word[1] not in waiting]
    _, reason, message = (serious or missing or [("False", Reason.STARTING, "starting")])[0]
    return "False", reason, message
