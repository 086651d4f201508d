"""Sets of revisions that answered the canary: who of them clients meet, and what each keeps.

There is one as a rule, the stable one, and the targets from their canary on. When the spec changes
once more before the targets are stable, they are remembered as served: pods of theirs serve, in the
places that stable ones gave up, and leave only as others take these over.

A set is whole while a router and a worker that answers are ready in it: routers of one model find
no worker in another's. So a role's last pod of the set that serves best stays until another set
serves better, whatever its role alone could spare. Pure; called by ``rollout``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.operator.api.status import RolloutStatus
from tandem.operator.clock import time_text
from tandem.operator.decide.views import RolloutView
from tandem.operator.desired.naming import WORKERS, Role
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.workload import RevisionKey

Revisions = dict[str, str]
"""Revision by role."""
_MOST = 8
"""Sets that are remembered as served, the newest ones; each is a change of the spec during a
rollout, whose pods are still there."""


def targets_of(view: RolloutView) -> Revisions:
    """What the spec asks for."""
    return {str(role): each.target for role, each in view.roles.items()}


def is_open(view: RolloutView) -> bool:
    """Whether the targets answered the canary."""
    return view.memory.servable == service_revision(targets_of(view))


def begun(view: RolloutView) -> RolloutStatus:
    """Memory of these targets; fresh when they are new. Targets that answered before need no
    canary, and those that are left for others are served on."""
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
    """Served sets that have a replica of a revision which is their own. What they share with
    targets that have not answered is: nobody else says that it did."""
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
    """Sets that answered the canary: the targets, the stable one, served ones."""
    memory = view.memory
    sets = [targets_of(view)] if is_open(view) else []
    return _once([*sets, *([memory.stable] if memory.stable else []), *memory.served])


def best(view: RolloutView) -> list[Revisions]:
    """The same, what serves most first; new targets where they answer as much as others."""
    targets = targets_of(view)

    def rank(each: Revisions) -> tuple[float, bool, float]:
        least, prefill = _strength(view, each)
        return least, each == targets != view.memory.stable, prefill

    return sorted(answered(view), key=rank, reverse=True)


def _strength(view: RolloutView, revisions: Revisions) -> tuple[float, float]:
    """Share of the routers, and of the workers that answer, that are ready, whichever is less;
    then the share of prefill workers."""

    def share(role: Role) -> float:
        each = view.roles[role]
        ready = each.of(revisions.get(role)).ready
        return min(1.0, ready / each.desired) if each.desired else 1.0

    least = min(share(Role.ROUTER), share(_answering(view)))
    return least, share(Role.PREFILL) if least else 0.0


def _answering(view: RolloutView) -> Role:
    return Role.DECODE if view.roles[Role.DECODE].desired else Role.PREFILL


def former(view: RolloutView, role: Role) -> list[str]:
    """Revisions of a role beside its target that answered, what serves most first."""
    names = [each[role] for each in best(view) if role in each]
    return [name for name in dict.fromkeys(names) if name != view.roles[role].target]


def is_known(view: RolloutView, role: Role) -> bool:
    """Whether a role's target answered, in whatever set."""
    return view.roles[role].target in (each.get(role) for each in answered(view))


def comes_back(view: RolloutView, role: Role) -> bool:
    """Whether a role's target is what was stable: others have its places and give them back."""
    return view.memory.stable.get(role) == view.roles[role].target


def spread(view: RolloutView, role: Role, old: int) -> dict[RevisionKey, int]:
    """``old`` replicas over the former revisions: ready ones stay first, and those of the set that
    serves most. What is lacking is made of that one's, unless the target is what was stable."""
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
    """Former revisions of a role whose last pod stays: of the set that serves most, which clients
    meet; and those of workers that a router of their set, which leaves, may still ask."""
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
    """Pods of routers that answered, that leave with this rollout, and are still there."""
    routers = view.roles[Role.ROUTER]
    return sum(routers.of(name).present for name in former(view, Role.ROUTER))


def reachable_routers(view: RolloutView) -> str | None:
    """Revision of routers that clients may reach; None for all.

    New routers come with another model or other settings: until the canary was right through one
    of them, clients stay with those that answered. Of several of these they meet the ones that have
    workers, or all where all have; while none has, those that are ready.
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
    """Revisions that clients meet, of which Servable speaks; empty where no set has come in
    between: the targets then, once they answered, and the stable ones before."""
    return best(view)[0] if view.memory.served else {}


def restored(view: RolloutView) -> RolloutView:
    """The same view where the stable revisions are what is moved to."""
    memory = view.memory
    roles = {
        role: msgspec.structs.replace(each, target=memory.stable.get(role, each.target))
        for role, each in view.roles.items()
    }
    back = msgspec.structs.replace(view, roles=roles)
    token = service_revision(targets_of(back))
    return msgspec.structs.replace(back, memory=msgspec.structs.replace(memory, servable=token))
