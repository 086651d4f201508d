"""Sets of revisions that answered the canary: those that clients reach, and their replicas.

Usually this is the stable set, and the targets after their canary. Targets that a later spec
replaced are remembered as served: their pods leave as others take over. A set requires a ready
router and an answering worker, so a role's last pod of the best set stays until another set is
better.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.operator.api.service import Surge
from tandem.operator.api.status import RolloutStatus
from tandem.operator.clock import time_text
from tandem.operator.desired.naming import WORKERS, Role
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.workload import RevisionKey


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """Observed pods of one revision of one role."""

    asked: int = 0
    """Replicas that its Deployment requests."""
    ready: int = 0
    present: int = 0
    """Its pods, including those that are being deleted."""
    unschedulable: bool = False
    """Whether one of its pods has been without a node for too long."""
    full: bool = False
    """Whether a quota has had no room for its pods for too long."""
    overdrawn: bool = False
    """Whether that quota is exceeded: a deleted pod makes no room."""


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas and observed revisions of one role."""

    desired: int
    target: str
    revisions: dict[str, RevisionView] = {}
    max_unavailable: int = 1

    def of(self, revision: str | None) -> RevisionView:
        """Return a revision's view, empty if there is none."""
        return self.revisions.get(revision or "", RevisionView())


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a decision."""

    roles: dict[Role, RoleView]
    memory: RolloutStatus
    now: float
    canary_ok: bool = False
    """Whether the canary of the targets succeeded."""
    suspended: bool = False
    gives_way: bool = False
    """Whether another service comes up first."""
    paused: bool = False
    non_retryable: bool = False
    """Whether the targets cannot come up until a person acts."""
    surge: Surge = Surge.AUTO
    deadline: float = 1200.0


Revisions = dict[str, str]
_MOST = 8
"""Maximum sets that are remembered as served."""


def targets_of(view: RolloutView) -> Revisions:
    """Return the revisions of the spec."""
    return {str(role): each.target for role, each in view.roles.items()}


def is_open(view: RolloutView) -> bool:
    """Return whether the targets answered the canary."""
    return view.memory.servable == service_revision(targets_of(view))


def begun(view: RolloutView) -> RolloutStatus:
    """Return the memory of these targets, a fresh one if they are new.

    Targets that answered before require no canary.
    """
    memory, targets = view.memory, targets_of(view)
    if memory.targets == targets:
        return memory
    token = service_revision(targets)
    left = [memory.targets] if memory.servable == service_revision(memory.targets) else []
    known = [*left, *memory.served]
    return RolloutStatus(
        targets=targets,
        stable=memory.stable,
        served=_once([each for each in known if each not in (targets, memory.stable)])[:_MOST],
        servable=token if targets in (memory.stable, *known) else None,
        failed=memory.failed if memory.failed == token else None,
        progressed_at=time_text(view.now),
    )


def _once(sets: list[Revisions]) -> list[Revisions]:
    return [each for at, each in enumerate(sets) if each not in sets[:at]]


def still_served(view: RolloutView, counts: Mapping[RevisionKey, int]) -> list[Revisions]:
    """Return the served sets that have a replica of their own revision.

    Revisions shared with unanswered targets count, too.
    """
    others = [view.memory.stable, *([targets_of(view)] if is_open(view) else [])]
    return [
        each
        for each in view.memory.served
        if any(
            counts.get((Role(role), name), 0)
            for role, name in each.items()
            if name not in (other.get(role) for other in others)
        )
    ]


def answered(view: RolloutView) -> list[Revisions]:
    """Return the sets that answered: the targets, the stable one, served ones."""
    memory = view.memory
    sets = [targets_of(view)] if is_open(view) else []
    return _once([*sets, *([memory.stable] if memory.stable else []), *memory.served])


def best(view: RolloutView) -> list[Revisions]:
    """Return the same sets, the strongest first; new targets first among equals."""
    targets = targets_of(view)

    def rank(each: Revisions) -> tuple[float, bool, float]:
        least, prefill = _strength(view, each)
        return least, each == targets != view.memory.stable, prefill

    return sorted(answered(view), key=rank, reverse=True)


def _strength(view: RolloutView, revisions: Revisions) -> tuple[float, float]:
    """Return the lesser share of ready routers and answering workers; then of prefill workers."""

    def share(role: Role) -> float:
        each = view.roles[role]
        ready = each.of(revisions.get(role)).ready
        return min(1.0, ready / each.desired) if each.desired else 1.0

    least = min(share(Role.ROUTER), share(_answering(view)))
    return least, share(Role.PREFILL) if least else 0.0


def _answering(view: RolloutView) -> Role:
    return Role.DECODE if view.roles[Role.DECODE].desired else Role.PREFILL


def former(view: RolloutView, role: Role) -> list[str]:
    """Return the answered revisions of a role except its target, the strongest first."""
    names = [each[role] for each in best(view) if role in each]
    return [name for name in dict.fromkeys(names) if name != view.roles[role].target]


def is_known(view: RolloutView, role: Role) -> bool:
    """Return whether a role's target answered, in any set."""
    return view.roles[role].target in (each.get(role) for each in answered(view))


def comes_back(view: RolloutView, role: Role) -> bool:
    """Return whether a role's target is the stable revision, which gets its places back."""
    return view.memory.stable.get(role) == view.roles[role].target


def spread(view: RolloutView, role: Role, old: int) -> dict[RevisionKey, int]:
    """Return ``old`` replicas over the former revisions.

    Ready ones and those of the strongest set stay first. Missing ones are of that set, unless the
    target is the stable revision.
    """
    each, names = view.roles[role], former(view, role)
    counts = dict.fromkeys(names, 0)
    for ready in (True, False):
        for name in names:
            seen = each.of(name)
            there = min(seen.asked, seen.ready) if ready else seen.asked
            lacking = old - sum(counts.values())
            counts[name] += max(0, min(there - counts[name], lacking))
    if names and not comes_back(view, role):
        counts[names[0]] += max(0, old - sum(counts.values()))
    for name in _held(view, role):
        counts[name] = max(counts.get(name, 0), min(1, each.of(name).asked))
    return {(role, name): count for name, count in counts.items()}


def _held(view: RolloutView, role: Role) -> set[str]:
    """Return the former revisions of a role whose last pod stays.

    They are that of the strongest set, and those that a leaving router may still call.
    """
    each, memory = view.roles[role], view.memory
    if not each.desired:
        return set()
    sets = answered(view)
    held = best(view)[:1]
    if memory.in_place and each.desired <= each.max_unavailable:
        held = []
    if not memory.in_place and role in WORKERS:
        held += [its for its in sets if _has_leaving_routers(view, its)]
    return {its[role] for its in held if role in its} - {each.target}


def _has_leaving_routers(view: RolloutView, revisions: Revisions) -> bool:
    routers, name = view.roles[Role.ROUTER], revisions.get(Role.ROUTER)
    return name != routers.target and routers.of(name).present > 0


def leaving_routers(view: RolloutView) -> int:
    """Return the existing pods of answered routers that leave with this rollout."""
    routers = view.roles[Role.ROUTER]
    return sum(routers.of(name).present for name in former(view, Role.ROUTER))


def reachable_routers(view: RolloutView) -> str | None:
    """Return the revision of routers that clients may reach; None for all.

    New routers are reached only after their canary. Of several revisions, those with workers are
    reached.
    """
    target = view.roles[Role.ROUTER].target
    if Role.ROUTER not in view.memory.stable:
        return None
    sets = best(view)
    names = {each[Role.ROUTER] for each in sets}
    whole = {each[Role.ROUTER] for each in sets if _strength(view, each)[0] > 0}
    up = {name for name in names if view.roles[Role.ROUTER].of(name).ready}
    if target in names and (names == {target} or up <= whole):
        return None
    ready = [each for each in sets if each[Role.ROUTER] in up]
    return (ready or sets)[0][Role.ROUTER]


def met(view: RolloutView) -> Revisions:
    """Return the revisions that clients reach; empty if no other set has answered in between."""
    return best(view)[0] if view.memory.served else {}


def restored(view: RolloutView) -> RolloutView:
    """Return the view with the stable revisions as targets."""
    memory = view.memory
    roles = {
        role: msgspec.structs.replace(each, target=memory.stable.get(role, each.target))
        for role, each in view.roles.items()
    }
    back = msgspec.structs.replace(view, roles=roles)
    token = service_revision(targets_of(back))
    return msgspec.structs.replace(back, memory=msgspec.structs.replace(memory, servable=token))
