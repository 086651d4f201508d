"""Replicas by role and revision: the state machine of a rollout, with its memory in the status.

A service has a target revision per role and a stable one. While they differ:

1. Pilot: one new replica per role, with surge in addition; in place the old role gives one first,
prefill before decode. A role never gives its last replica to a quota.

2. The canary asks the new pair. If it succeeds, the router gets the new revision.

3. The slower role moves first, by ``max_unavailable``, so the ratio of roles stays.

4. Old workers stay until the last old router is gone, which has no others.

5. When every role is new, the targets are stable.

Targets that miss their deadline are taken back. Replaced targets that were servable serve on until
others are ready (``answered``).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from tandem.operator.api.service import Surge
from tandem.operator.api.status import RolloutStatus
from tandem.operator.clock import parse_time, time_text
from tandem.operator.decide.answered import (
    RevisionView,
    RoleView,
    RolloutView,
    answered,
    begun,
    comes_back,
    former,
    is_known,
    is_open,
    leaving_routers,
    met,
    reachable_routers,
    restored,
    spread,
    still_served,
    targets_of,
)
from tandem.operator.desired.naming import WORKERS, Role
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.workload import RevisionKey


class Phase(StrEnum):
    """Phase of a rollout."""

    STABLE = "Stable"
    FIRST = "First"
    """First revision: no earlier one has to stay."""
    PILOT = "Pilot"
    ROLLING = "Rolling"
    PAUSED = "Paused"
    FAILED = "Failed"
    SUSPENDED = "Suspended"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Wanted state of a rollout."""

    phase: Phase
    counts: dict[RevisionKey, int]
    memory: RolloutStatus
    admitted: set[RevisionKey]
    routers: str | None = None
    """Revision of routers for clients; None for all."""
    met: dict[str, str] = {}
    """Revisions that clients reach, if several sets answered the canary."""
    gap: bool = False
    """Whether a role has no replica for a while."""


def decide(view: RolloutView) -> Decision:
    """Return the counts for the view, and the new memory."""
    view = msgspec.structs.replace(view, memory=begun(view))
    memory = _progress(view, view.memory)
    view = msgspec.structs.replace(view, memory=memory)
    token = token_of(view)
    first = not memory.stable
    if view.suspended:
        return _decision(view, Phase.SUSPENDED, dict.fromkeys(_existing(view), 0))
    if _is_given_up(view, memory, token) and not first:
        return _decision(view, Phase.FAILED, _taken_back(view))
    if first and view.gives_way:
        return _decision(view, Phase.FIRST, dict.fromkeys(_existing(view), 0))
    if first or not _rolling(view):
        return _settled(view, first=first)
    if view.paused:
        return _decision(view, Phase.PAUSED, _as_they_are(view))
    return _rolled(view)


def _is_given_up(view: RolloutView, memory: RolloutStatus, token: str) -> bool:
    """Return whether the targets are taken back; never those that were servable."""
    lost = view.non_retryable and memory.servable != token
    return memory.failed == token or lost


def token_of(view: RolloutView) -> str:
    """Return the name of the targets together."""
    return service_revision(targets_of(view))


def token_name(memory: RolloutStatus) -> str:
    """Return the name of the targets in a memory."""
    return service_revision(memory.targets)


def _progress(view: RolloutView, memory: RolloutStatus) -> RolloutStatus:
    """Return the memory after a pass: progress, canary, deadline, a full quota."""
    token = service_revision(memory.targets)
    ready = sum(role.of(role.target).ready for role in view.roles.values())
    changes: dict[str, object] = {}
    if view.canary_ok and memory.servable != token:
        changes |= {"servable": token, "failed": None, "progressed_at": time_text(view.now)}
    if ready > memory.ready:
        changes |= {"ready": ready, "progressed_at": time_text(view.now)}
    if view.suspended:
        changes["ready"] = 0  # all pods go: the first one ready again is progress
    if view.non_retryable or view.paused or view.suspended or view.gives_way:
        changes["progressed_at"] = None  # its deadline begins again when it may come up
    elif memory.progressed_at is None:
        changes["progressed_at"] = time_text(view.now)
    memory = msgspec.structs.replace(memory, **changes)
    if _needs_place(view, memory):
        memory = msgspec.structs.replace(memory, in_place=True)
    if _is_late(view, memory, token):
        return msgspec.structs.replace(memory, failed=token)
    return memory


def _needs_place(view: RolloutView, memory: RolloutStatus) -> bool:
    if view.surge is Surge.NEVER:
        return True
    stuck = any(seen.unschedulable for seen in _coming(view, memory))
    stuck = stuck or _gives_way_to_quota(view, memory)
    return memory.in_place or (view.surge is Surge.AUTO and stuck and bool(memory.stable))


def _coming(view: RolloutView, memory: RolloutStatus) -> list[RevisionView]:
    """Return the revisions that replace replicas of others: targets, and a returning stable one."""
    names = [memory.targets, *([memory.stable] if memory.served else [])]
    return [role.of(each.get(its)) for its, role in view.roles.items() for each in names]


def _gives_way_to_quota(view: RolloutView, memory: RolloutStatus) -> bool:
    """Return whether a quota refuses new pods that may replace old ones."""
    full = [seen for seen in _coming(view, memory) if seen.full]
    spare = can_spare(view.roles[role].desired for role in _rolling(view))
    return bool(full) and spare and not any(seen.overdrawn for seen in full)


def can_spare(desired: Iterable[int]) -> bool:
    """Return whether each rolling role keeps a replica when it gives one up.

    Another pod may take the quota's room first.
    """
    return all(count != 1 for count in desired)


def _is_late(view: RolloutView, memory: RolloutStatus, token: str) -> bool:
    if memory.servable == token or memory.progressed_at is None:
        return False
    return view.now - parse_time(memory.progressed_at) > view.deadline


def _rolling(view: RolloutView) -> list[Role]:
    """Return the roles with a target that is not stable, or with replicas of former revisions."""
    return [
        role
        for role, each in view.roles.items()
        if not comes_back(view, role) or any(each.of(its).asked for its in former(view, role))
    ]


def _settled(view: RolloutView, *, first: bool) -> Decision:
    """Return the decision with every role at its target."""
    counts = dict.fromkeys(_existing(view), 0)
    counts |= {(role, each.target): each.desired for role, each in view.roles.items()}
    memory, token = view.memory, token_of(view)
    if memory.servable == token:
        memory = msgspec.structs.replace(memory, stable=targets_of(view), failed=None)
        first = False
    if not first:
        memory = msgspec.structs.replace(memory, in_place=False)
    phase = Phase.STABLE
    if first:
        phase = Phase.FAILED if _is_given_up(view, memory, token) else Phase.FIRST
    return _decision(msgspec.structs.replace(view, memory=memory), phase, counts)


def _rolled(view: RolloutView) -> Decision:
    counts, gap = _moved(view)
    if _is_done(view, counts):
        return _settled(view, first=False)
    return _decision(view, Phase.ROLLING if is_open(view) else Phase.PILOT, counts, gap=gap)


def _moved(view: RolloutView) -> tuple[dict[RevisionKey, int], bool]:
    counts = dict.fromkeys(_existing(view), 0)
    gap = False
    for role, each in view.roles.items():
        new, old = _step(view, role)
        counts |= spread(view, role, old)
        counts[(role, each.target)] = new
        if role in _rolling(view):
            kept = sum(counts[(role, name)] for name in former(view, role))
            gap = gap or (each.desired > 0 and kept == 0 and _serving(view, role) == 0)
    return counts, gap


def _serving(view: RolloutView, role: Role) -> int:
    """Return the ready and answered replicas of a role's target."""
    each = view.roles[role]
    return each.of(each.target).ready if is_known(view, role) else 0


def _step(view: RolloutView, role: Role) -> tuple[int, int]:
    each = view.roles[role]
    if role not in _rolling(view):
        return each.desired, 0
    now = each.of(each.target)
    surge = 0 if view.memory.in_place else 1
    floor = each.desired if surge else max(0, each.desired - each.max_unavailable)
    keep = max(0, floor - _serving(view, role))
    if comes_back(view, role):
        keep = min(keep, sum(each.of(name).ready for name in former(view, role)))
        new, old = min(each.desired, each.desired + surge - keep), keep
    else:
        most = max(0, each.desired + surge - keep)
        new = min(_wanted(view, role), each.desired, most)
        old = min(each.desired, each.desired + surge - new)
        if is_open(view) and now.ready >= each.desired:
            old = 0
    if surge and role in WORKERS and each.desired and leaving_routers(view):
        return new, max(old, keep, 1)
    if surge:
        return new, max(old, keep)
    if (
        now.full and not now.present
    ):  # the desired count has decreased since old ones began to leave
        asked = sum(each.of(name).asked for name in former(view, role))
        old = max(old, min(1, each.desired, asked))
    return _asked_anew(each, new), old


def _asked_anew(each: RoleView, new: int) -> int:
    """Return the new replicas in place.

    A refused count is reset once the old pods are gone: a ReplicaSet with a new count tries at
    once.
    """
    now = each.of(each.target)
    left = sum(seen.present for name, seen in each.revisions.items() if name != each.target)
    return min(new, now.present) if now.full and new + left <= each.desired else new


def _wanted(view: RolloutView, role: Role) -> int:
    """Return the required new replicas of a role, in its turn."""
    each = view.roles[role]
    now = each.of(each.target)
    if not is_open(view):
        if view.memory.in_place and role is Role.DECODE and not _prefill_is_up(view):
            return min(now.asked, now.present)  # a pilot refused by a quota waits for its turn
        return max(now.asked, 1)
    if now.ready < now.asked or _share(view, role) > min(_share(view, r) for r in _pace(view)):
        return now.asked
    return now.asked + each.max_unavailable


def _prefill_is_up(view: RolloutView) -> bool:
    each = view.roles[Role.PREFILL]
    return each.desired == 0 or each.of(each.target).ready > 0


def _pace(view: RolloutView) -> list[Role]:
    """Return the roles that move in step."""
    rolling = [role for role in _rolling(view) if view.roles[role].desired > 0]
    return [role for role in rolling if role in WORKERS] or rolling or [Role.ROUTER]


def _share(view: RolloutView, role: Role) -> float:
    each = view.roles[role]
    if role is Role.ROUTER and role not in _pace(view):
        return 0.0
    return each.of(each.target).asked / each.desired if each.desired else 1.0


def _taken_back(view: RolloutView) -> dict[RevisionKey, int]:
    """Return no replica of the targets, and all of the stable revisions if there is room."""
    back = restored(view)
    return dict.fromkeys(_existing(view), 0) | _moved(back)[0]


def _as_they_are(view: RolloutView) -> dict[RevisionKey, int]:
    """Return the counts of a pause.

    A role without replicas gets its desired count of the stable revision.
    """
    counts = {
        (role, revision): seen.asked
        for role, each in view.roles.items()
        for revision, seen in each.revisions.items()
    }
    for role, each in view.roles.items():
        if not any(seen.asked for seen in each.revisions.values()):
            counts[(role, view.memory.stable.get(role, each.target))] = each.desired
    return counts


def _existing(view: RolloutView) -> list[RevisionKey]:
    return [(role, revision) for role, each in view.roles.items() for revision in each.revisions]


def _is_done(view: RolloutView, counts: dict[RevisionKey, int]) -> bool:
    if not is_open(view) or (not view.memory.in_place and leaving_routers(view)):
        return False
    for role, each in view.roles.items():
        if counts[(role, each.target)] != each.desired:
            return False
        if each.of(each.target).ready < each.desired:
            return False
    return True


def _decision(
    view: RolloutView, phase: Phase, counts: dict[RevisionKey, int], *, gap: bool = False
) -> Decision:
    memory = view.memory
    left = still_served(view, counts)
    if left != memory.served:
        memory = msgspec.structs.replace(memory, served=left)
        view = msgspec.structs.replace(view, memory=memory)
    sets = answered(view)
    admitted = {(Role(role), name) for each in sets for role, name in each.items()}
    return Decision(
        phase=phase,
        counts=counts,
        memory=memory,
        admitted=admitted,
        gap=gap,
        routers=reachable_routers(view),
        met=met(view),
    )
