"""Replicas by role and revision: the state machine of a rollout. Pure, so that it is tested as a
table, and level-triggered: what it remembers is in the status, so another operator goes on with it.

A service has a target revision per role (what the spec asks for) and a stable one (what last
served). While they differ:

1. Pilot: one new replica a role. With surge it comes on top; in place the old role gives one first,
   prefill before decode, and Pending is the new pod's place in the queue. A full quota has
   none: no role gives its last replica to one.
2. The canary asks the new pair. Only when it is right does the router get the new revision.
3. The role that lags goes on, by ``max_unavailable`` at a time, and old replicas leave as new ones
   become ready: P:D stays what it was.
4. A worker of the old revision stays until the last old router is gone: that one may still be
   asked, and finds no other worker that it may use.
5. When every role is new, the targets are stable.

A target that is not servable by its deadline, or that is known never to be, is taken back: its
counts go to 0, the stable ones to what they were. Called by ``reconcile``.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from tandem.operator.api.service import Surge
from tandem.operator.api.status import RolloutStatus
from tandem.operator.clock import parse_time, time_text
from tandem.operator.desired.naming import WORKERS, Role
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.workload import RevisionKey


class Phase(StrEnum):
    """Where a rollout is."""

    STABLE = "Stable"
    FIRST = "First"
    """The first revision comes up: nothing to keep alive beside it."""
    PILOT = "Pilot"
    ROLLING = "Rolling"
    PAUSED = "Paused"
    FAILED = "Failed"
    SUSPENDED = "Suspended"


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of one role, as observed."""

    asked: int = 0
    """Replicas of its Deployment."""
    ready: int = 0
    present: int = 0
    """Pods of it, those that are leaving included."""
    unschedulable: bool = False
    """A pod of it has been without a node for too long."""
    full: bool = False
    """A quota has had no room for a pod of it for too long."""
    overdrawn: bool = False
    """That quota holds more already than it allows: a pod that goes makes no room there."""


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """One role."""

    desired: int
    target: str
    revisions: dict[str, RevisionView] = {}
    max_unavailable: int = 1

    def of(self, revision: str | None) -> RevisionView:
        """A revision's view, empty where there is none."""
        return self.revisions.get(revision or "", RevisionView())


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision is made of."""

    roles: dict[Role, RoleView]
    memory: RolloutStatus
    now: float
    canary_ok: bool = False
    """The canary was right on the targets."""
    suspended: bool = False
    paused: bool = False
    non_retryable: bool = False
    """The targets cannot come up before a person changes something: no deadline is awaited."""
    surge: Surge = Surge.AUTO
    deadline: float = 1200.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What shall be."""

    phase: Phase
    counts: dict[RevisionKey, int]
    memory: RolloutStatus
    admitted: set[RevisionKey]
    """Revisions that routers may use."""
    gap: bool = False
    """A role has no replica at all for a while."""


def decide(view: RolloutView) -> Decision:
    """Counts that follow from what is seen, and what to remember."""
    memory = _progress(view, _begun(view))
    view = msgspec.structs.replace(view, memory=memory)
    token = token_of(view)
    first = not memory.stable
    if view.suspended:
        return _decision(view, Phase.SUSPENDED, dict.fromkeys(_existing(view), 0))
    if _is_given_up(view, memory, token) and not first:
        return _decision(view, Phase.FAILED, _restored(view))
    if first or not _rolling(view):
        return _settled(view, first=first)
    if view.paused:
        return _decision(view, Phase.PAUSED, _as_they_are(view))
    return _rolled(view)


def _is_given_up(view: RolloutView, memory: RolloutStatus, token: str) -> bool:
    """Whether the targets are taken back. Those that were servable have what they need, whatever a
    later spec lacks."""
    lost = view.non_retryable and memory.servable != token
    return memory.failed == token or lost


def token_of(view: RolloutView) -> str:
    """Name of the targets together."""
    return service_revision(_targets(view))


def token_name(memory: RolloutStatus) -> str:
    """Name of the targets that a memory is about."""
    return service_revision(memory.targets)


def _targets(view: RolloutView) -> dict[str, str]:
    return {str(role): each.target for role, each in view.roles.items()}


def _begun(view: RolloutView) -> RolloutStatus:
    """Memory of these targets; fresh when they are new."""
    memory, targets = view.memory, _targets(view)
    if memory.targets == targets:
        return memory
    token = service_revision(targets)
    return RolloutStatus(
        targets=targets,
        stable=memory.stable,
        servable=memory.servable if memory.servable == token else None,
        failed=memory.failed if memory.failed == token else None,
        progressed_at=time_text(view.now),
    )


def _progress(view: RolloutView, memory: RolloutStatus) -> RolloutStatus:
    """Memory after what was observed: progress, the canary's word, the deadline, a full house."""
    token = service_revision(memory.targets)
    ready = sum(role.of(role.target).ready for role in view.roles.values())
    changes: dict[str, object] = {}
    if view.canary_ok and memory.servable != token:
        changes |= {"servable": token, "failed": None, "progressed_at": time_text(view.now)}
    if ready > memory.ready:
        changes |= {"ready": ready, "progressed_at": time_text(view.now)}
    if view.suspended:
        changes["ready"] = 0  # every pod goes: the first that is there again is progress
    if view.non_retryable or view.paused or view.suspended:
        changes["progressed_at"] = None  # its deadline begins anew when it may come up again
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
    stuck = any(role.of(role.target).unschedulable for role in view.roles.values())
    stuck = stuck or _gives_way_to_quota(view)
    return memory.in_place or (view.surge is Surge.AUTO and stuck and bool(memory.stable))


def _gives_way_to_quota(view: RolloutView) -> bool:
    """Whether a quota refuses new pods that may take the place of old ones."""
    full = [seen for role in view.roles.values() if (seen := role.of(role.target)).full]
    spare = can_spare(view.roles[role].desired for role in _rolling(view))
    return bool(full) and spare and not any(seen.overdrawn for seen in full)


def can_spare(desired: Iterable[int]) -> bool:
    """Whether each of the roles that roll keeps a replica when it gives one up. A quota tells one
    bound at a time, and whoever is first takes what gets free: a last replica is not bet on it."""
    return all(count != 1 for count in desired)


def _is_late(view: RolloutView, memory: RolloutStatus, token: str) -> bool:
    if memory.servable == token or memory.progressed_at is None:
        return False
    return view.now - parse_time(memory.progressed_at) > view.deadline


def _rolling(view: RolloutView) -> list[Role]:
    """Roles whose stable revision is not their target."""
    stable = view.memory.stable
    return [role for role, each in view.roles.items() if stable.get(role) != each.target]


def _settled(view: RolloutView, *, first: bool) -> Decision:
    """Every role at its target, everything else gone."""
    counts = dict.fromkeys(_existing(view), 0)
    counts |= {(role, each.target): each.desired for role, each in view.roles.items()}
    memory, token = view.memory, token_of(view)
    if memory.servable == token:
        memory = msgspec.structs.replace(memory, stable=_targets(view), failed=None)
        first = False
    if not first:
        memory = msgspec.structs.replace(memory, in_place=False)
    phase = Phase.STABLE
    if first:
        phase = Phase.FAILED if _is_given_up(view, memory, token) else Phase.FIRST
    return _decision(msgspec.structs.replace(view, memory=memory), phase, counts)


def _rolled(view: RolloutView) -> Decision:
    """One look at roles on their way."""
    counts = dict.fromkeys(_existing(view), 0)
    gap = False
    for role, each in view.roles.items():
        new, old = _step(view, role)
        counts |= _shared(view, role, old)
        counts[(role, each.target)] = new
        if role not in _rolling(view):
            continue
        ready = each.of(each.target).ready if view.memory.servable == token_of(view) else 0
        gap = gap or (each.desired > 0 and old == 0 and ready == 0)
    if _is_done(view, counts):
        return _settled(view, first=False)
    opened = view.memory.servable == token_of(view)
    return _decision(view, Phase.ROLLING if opened else Phase.PILOT, counts, gap=gap)


def _step(view: RolloutView, role: Role) -> tuple[int, int]:
    """New and old replicas of a role now."""
    each = view.roles[role]
    if role not in _rolling(view):
        return each.desired, 0
    now = each.of(each.target)
    opened = view.memory.servable == token_of(view)
    surge = 0 if view.memory.in_place else 1
    floor = each.desired if surge else max(0, each.desired - each.max_unavailable)
    keep = max(0, floor - (now.ready if opened else 0))
    most = max(0, each.desired + surge - keep)
    new = min(_wanted(view, role, opened=opened), each.desired, most)
    old = min(each.desired, each.desired + surge - new)
    if opened and now.ready >= each.desired:
        old = 0
    if surge and role in WORKERS and each.desired and _old_routers(view):
        return new, max(old, keep, 1)
    if surge:
        return new, max(old, keep)
    if now.full and not now.present:  # fewer are desired now than when the old ones began to give
        old = max(old, min(1, each.desired, each.of(view.memory.stable.get(role)).asked))
    return _asked_anew(each, new), old


def _asked_anew(each: RoleView, new: int) -> int:
    """New replicas in place. What a quota refused is given back once when the old pods are gone:
    a ReplicaSet that is asked anew tries at once, and one that waits does in up to 1000 s."""
    now = each.of(each.target)
    left = sum(seen.present for name, seen in each.revisions.items() if name != each.target)
    return min(new, now.present) if now.full and new + left <= each.desired else new


def _wanted(view: RolloutView, role: Role, *, opened: bool) -> int:
    """New replicas that a role would like, its turn and the others considered."""
    each = view.roles[role]
    now = each.of(each.target)
    if not opened:
        if view.memory.in_place and role is Role.DECODE and not _prefill_is_up(view):
            return min(now.asked, now.present)  # a pilot that no quota took waits for its turn
        return max(now.asked, 1)
    if now.ready < now.asked or _share(view, role) > min(_share(view, r) for r in _pace(view)):
        return now.asked
    return now.asked + each.max_unavailable


def _old_routers(view: RolloutView) -> int:
    """Pods of routers that leave with this rollout and are still there."""
    if Role.ROUTER not in _rolling(view):
        return 0
    return view.roles[Role.ROUTER].of(view.memory.stable.get(Role.ROUTER)).present


def _prefill_is_up(view: RolloutView) -> bool:
    each = view.roles[Role.PREFILL]
    return each.desired == 0 or each.of(each.target).ready > 0


def _pace(view: RolloutView) -> list[Role]:
    """Roles that keep step with each other."""
    rolling = [role for role in _rolling(view) if view.roles[role].desired > 0]
    return [role for role in rolling if role in WORKERS] or rolling or [Role.ROUTER]


def _share(view: RolloutView, role: Role) -> float:
    each = view.roles[role]
    if role is Role.ROUTER and role not in _pace(view):
        return 0.0
    return each.of(each.target).asked / each.desired if each.desired else 1.0


def _shared(view: RolloutView, role: Role, old: int) -> dict[RevisionKey, int]:
    """``old`` replicas: the stable revision takes them, what was given up half-way gets none."""
    stable = view.memory.stable.get(role)
    if stable is None or stable == view.roles[role].target:
        return {}
    return {(role, stable): old}


def _restored(view: RolloutView) -> dict[RevisionKey, int]:
    """Stable revisions with all replicas, targets with none."""
    counts = dict.fromkeys(_existing(view), 0)
    for role, each in view.roles.items():
        counts[(role, view.memory.stable.get(role, each.target))] = each.desired
    return counts


def _as_they_are(view: RolloutView) -> dict[RevisionKey, int]:
    return {
        (role, revision): seen.asked
        for role, each in view.roles.items()
        for revision, seen in each.revisions.items()
    }


def _existing(view: RolloutView) -> list[RevisionKey]:
    return [(role, revision) for role, each in view.roles.items() for revision in each.revisions]


def _is_done(view: RolloutView, counts: dict[RevisionKey, int]) -> bool:
    if view.memory.servable != token_of(view) or (not view.memory.in_place and _old_routers(view)):
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
    admitted = {(Role(role), revision) for role, revision in memory.stable.items()}
    if memory.servable == token_of(view):
        admitted |= {(role, each.target) for role, each in view.roles.items()}
    return Decision(phase=phase, counts=counts, memory=memory, admitted=admitted, gap=gap)
