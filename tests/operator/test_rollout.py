"""The rollout as a table: what was seen, what is remembered, and what follows. Virtual time."""

from __future__ import annotations

import msgspec
import pytest

from tandem.operator.api.service import Surge
from tandem.operator.api.status import RolloutStatus
from tandem.operator.clock import time_text
from tandem.operator.decide.answered import RevisionView, RoleView, RolloutView
from tandem.operator.decide.rollout import (
    Decision,
    Phase,
    decide,
    token_of,
)
from tandem.operator.desired.naming import Role
from tandem.operator.desired.revision import service_revision

NOW = 1_800_000_000.0
OLD = {"prefill": "old", "decode": "old", "router": "r"}
Counts = dict[str, tuple[int, int]]


def seen(
    asked: int, ready: int | None = None, *, stuck: bool = False, present: int = 0
) -> RevisionView:
    up = asked if ready is None else ready
    return RevisionView(asked=asked, ready=up, present=present, unschedulable=stuck)


def refused(asked: int = 1, *, overdrawn: bool = False) -> RevisionView:
    """A revision of whose pods a quota takes none."""
    return RevisionView(asked=asked, full=True, overdrawn=overdrawn)


def view(
    prefill: dict[str, RevisionView],
    decode: dict[str, RevisionView],
    *,
    desired: tuple[int, int] = (2, 2),
    target: str = "new",
    stable: dict[str, str] | None = None,
    **more: object,
) -> RolloutView:
    """Workers on their way to ``target``; the router is where it shall be."""
    memory = RolloutStatus(stable=OLD if stable is None else stable)
    roles = {
        Role.PREFILL: RoleView(desired=desired[0], target=target, revisions=prefill),
        Role.DECODE: RoleView(desired=desired[1], target=target, revisions=decode),
        Role.ROUTER: RoleView(desired=1, target="r", revisions={"r": seen(1)}),
    }
    return msgspec.structs.replace(RolloutView(roles=roles, memory=memory, now=NOW), **more)


def counts(decision: Decision) -> dict[str, int]:
    return {f"{role[0]}:{name}": count for (role, name), count in decision.counts.items()}


def walk(now: RolloutView, *, ready: bool = True, canary: bool = True, steps: int = 30):
    """Decisions until nothing changes; each is obeyed at once, new pods become ready or not."""
    decisions = []
    for step in range(steps):
        decision = decide(now)
        decisions.append(decision)
        if step and decision.counts == decisions[-2].counts and decision.phase is Phase.STABLE:
            return decisions
        roles = {}
        for role, each in now.roles.items():
            revisions = {}
            for (its, name), count in decision.counts.items():
                if its is role:
                    up = ready or name != each.target or role is Role.ROUTER
                    revisions[name] = seen(count, count if up else 0)
            roles[role] = msgspec.structs.replace(each, revisions=revisions)
        pilots = all(each.desired == 0 or each.of(each.target).ready > 0 for each in roles.values())
        now = msgspec.structs.replace(
            now,
            roles=roles,
            memory=decision.memory,
            now=now.now + 10,
            canary_ok=canary and pilots,
        )
    return decisions


def capacity(decision: Decision, role: Role) -> int:
    """Replicas of a role over all revisions."""
    return sum(count for (its, _), count in decision.counts.items() if its is role)


def test_a_first_revision_gets_all_its_replicas_at_once():
    decision = decide(view({}, {}, stable={}))
    assert decision.phase is Phase.FIRST
    assert counts(decision) == {"p:new": 2, "d:new": 2, "r:r": 1}
    assert decision.admitted == set()


def test_what_answered_the_canary_is_stable():
    """A first revision becomes stable, and is admitted, by its canary."""
    first = view({"new": seen(2)}, {"new": seen(2)}, stable={}, canary_ok=True)
    decision = decide(first)
    assert decision.phase is Phase.STABLE
    assert decision.memory.stable == {"prefill": "new", "decode": "new", "router": "r"}
    assert (Role.DECODE, "new") in decision.admitted


def test_the_pilot_comes_on_top():
    """With room to spare one new replica a role starts beside all old ones, unadmitted."""
    decision = decide(view({"old": seen(2)}, {"old": seen(2)}))
    assert decision.phase is Phase.PILOT
    assert not decision.gap  # the router, which stays as it is, is no gap either
    assert counts(decision) == {"p:old": 2, "p:new": 1, "d:old": 2, "d:new": 1, "r:r": 1}
    assert decision.admitted == {(Role(role), name) for role, name in OLD.items()}


def test_without_room_the_pilot_takes_a_place_prefill_first():
    """In place, prefill gives a replica first; decode only when the new prefill is ready."""
    now = view({"old": seen(2)}, {"old": seen(2)}, surge=Surge.NEVER)
    assert counts(decide(now)) == {"p:old": 1, "p:new": 1, "d:old": 2, "d:new": 0, "r:r": 1}
    now = view({"old": seen(1), "new": seen(1)}, {"old": seen(2)}, surge=Surge.NEVER)
    assert counts(decide(now)) == {"p:old": 1, "p:new": 1, "d:old": 1, "d:new": 1, "r:r": 1}


def test_a_pilot_without_a_node_turns_the_rollout_in_place():
    """Surge Auto gives up its extra replica once a new pod found no node for too long."""
    stuck = {"old": seen(2), "new": seen(1, 0, stuck=True)}
    decision = decide(view(stuck, {"old": seen(2), "new": seen(1)}))
    assert decision.memory.in_place
    assert capacity(decision, Role.PREFILL) == 2


def test_a_pilot_that_a_quota_refuses_waits_for_its_turn():
    """Decode gives no replica before the new prefill is up; its pilot, which has no pod, is given
    back until then."""
    both = {"old": seen(2, present=2), "new": refused()}
    decision = decide(view(both, both))
    assert decision.memory.in_place
    assert counts(decision) == {"p:old": 1, "p:new": 1, "d:old": 2, "d:new": 0, "r:r": 1}
    up = {"old": seen(1, present=1), "new": seen(1, present=1)}
    given = {"old": seen(2, present=2), "new": seen(0)}
    decision = decide(view(up, given, memory=decision.memory))
    assert (decision.counts[(Role.DECODE, "old")], decision.counts[(Role.DECODE, "new")]) == (1, 1)


@pytest.mark.parametrize("desired", [(1, 1), (2, 1), (1, 2)])
def test_no_role_gives_its_last_replica_to_a_full_quota(desired: tuple[int, int]):
    """What gets free may be somebody else's: what was there stays, until the deadline and after."""
    prefill, decode = ({"old": seen(count, present=count), "new": refused()} for count in desired)
    now = view(prefill, decode, desired=desired)
    decision = decide(now)
    assert not decision.memory.in_place
    assert decision.counts[(Role.PREFILL, "old")] == desired[0]
    assert decision.counts[(Role.DECODE, "old")] == desired[1]
    late = decide(msgspec.structs.replace(now, memory=decision.memory, now=NOW + 1201))
    assert late.phase is Phase.FAILED
    assert late.counts[(Role.DECODE, "old")] == desired[1]


def test_nothing_gives_way_to_a_quota_that_is_overdrawn():
    """A pod that goes makes no room there, whatever the other role's quota says."""
    two = {"old": seen(2, present=2)}
    decision = decide(view({**two, "new": refused()}, {**two, "new": refused(overdrawn=True)}))
    assert not decision.memory.in_place
    assert decision.counts[(Role.PREFILL, "old")] == 2


def test_the_last_replica_stays_when_fewer_are_desired_while_a_quota_refuses():
    """A scaler that goes from two to one in the middle takes none that the new pods do not give."""
    memory = decide(view({}, {"old": seen(2), "new": refused()})).memory
    held = {"old": seen(1, present=1), "new": refused()}
    decision = decide(view(held, held, desired=(1, 1), memory=memory))
    assert decision.memory.in_place
    assert decision.counts[(Role.PREFILL, "old")] == 1
    none = decide(view(held, held, desired=(0, 1), memory=memory))
    assert none.counts[(Role.PREFILL, "old")] == 0


@pytest.mark.parametrize(("left", "asked"), [(2, 1), (1, 0)])
def test_what_a_quota_refused_is_asked_anew_when_the_old_pod_is_gone(left: int, asked: int):
    """A ReplicaSet that was refused tries again only after ever longer waits, unless its count
    changes: it falls once there is room, and rises with the next look."""
    prefill = {"old": seen(1, present=left), "new": refused()}
    decode = {"old": seen(2, present=2)}
    decision = decide(view(prefill, decode, surge=Surge.NEVER))
    assert counts(decision) == {"p:old": 1, "p:new": asked, "d:old": 2, "d:new": 0, "r:r": 1}
    prefill = {"old": seen(1, present=1), "new": seen(0)}
    decision = decide(view(prefill, decode, memory=decision.memory, surge=Surge.NEVER))
    assert counts(decision)["p:new"] == 1


def test_one_replica_and_no_room_is_a_gap():
    """The gap of a single replica without spare capacity is told."""
    now = view(
        {"old": seen(0), "new": seen(1)},
        {"old": seen(1)},
        desired=(1, 1),
        surge=Surge.NEVER,
    )
    decision = decide(now)
    assert counts(decision)["d:old"] == 0
    assert decision.gap


@pytest.mark.parametrize("surge", [Surge.AUTO, Surge.NEVER])
@pytest.mark.parametrize("desired", [(1, 1), (2, 2), (4, 2), (1, 5), (3, 7), (0, 2)])
def test_every_walk_ends_with_the_new_revision_alone(surge: Surge, desired: tuple[int, int]):
    """Whatever the counts: all replicas are new in the end, the ratio and the limits kept."""
    start = view({"old": seen(desired[0])}, {"old": seen(desired[1])}, desired=desired, surge=surge)
    decisions = walk(start)
    last = decisions[-1]
    assert last.phase is Phase.STABLE
    assert last.counts[(Role.PREFILL, "new")] == desired[0]
    assert last.counts[(Role.DECODE, "new")] == desired[1]
    assert {count for (_, name), count in last.counts.items() if name == "old"} <= {0}
    extra = 0 if surge is Surge.NEVER else 1
    for decision in decisions:
        for role, limit in zip((Role.PREFILL, Role.DECODE), desired, strict=True):
            assert capacity(decision, role) <= limit + extra
            assert capacity(decision, role) >= limit - 1


@pytest.mark.parametrize("desired", [(4, 2), (2, 6)])
def test_the_ratio_of_new_replicas_follows_the_old_one(desired: tuple[int, int]):
    """Neither role is more than one step ahead of the other in share of new replicas."""
    start = view({"old": seen(desired[0])}, {"old": seen(desired[1])}, desired=desired)
    for decision in walk(start):
        prefill = decision.counts.get((Role.PREFILL, "new"), 0) / desired[0]
        decode = decision.counts.get((Role.DECODE, "new"), 0) / desired[1]
        assert abs(prefill - decode) <= 1 / min(desired)


def test_nothing_rolls_before_the_canary():
    """A pilot whose canary is not right stays alone, however ready it is."""
    decisions = walk(view({"old": seen(2)}, {"old": seen(2)}), canary=False, steps=20)
    assert all(decision.counts[(Role.DECODE, "new")] <= 1 for decision in decisions)
    assert all(decision.counts[(Role.DECODE, "old")] == 2 for decision in decisions)


def test_a_revision_that_is_late_is_taken_back():
    """Past its deadline the new revision goes, and the old counts are there again."""
    start = view({"old": seen(2)}, {"old": seen(2)}, surge=Surge.NEVER, deadline=60.0)
    last = walk(start, ready=False, steps=20)[-1]
    assert last.phase is Phase.FAILED
    assert counts(last) == {"p:old": 2, "p:new": 0, "d:old": 2, "d:new": 0, "r:r": 1}
    assert last.admitted == {(Role(role), name) for role, name in OLD.items()}


def test_a_revision_that_was_servable_rolls_on_though_a_later_spec_lacks_its_model():
    """The targets have theirs: what serves is not torn down for a typo in what comes next."""
    targets = {"prefill": "new", "decode": "new", "router": "r"}
    memory = RolloutStatus(targets=targets, stable=OLD, servable=service_revision(targets))
    rolled = {"old": seen(0), "new": seen(2)}
    half = {"old": seen(1), "new": seen(1)}
    decision = decide(view(rolled, rolled, memory=memory, non_retryable=True))
    assert (decision.phase, decision.counts[(Role.DECODE, "new")]) == (Phase.STABLE, 2)
    decision = decide(view(half, half, memory=memory, non_retryable=True))
    assert (decision.phase, decision.counts[(Role.DECODE, "new")]) == (Phase.ROLLING, 2)
    lost = msgspec.structs.replace(memory, servable=None)
    decision = decide(view(half, half, memory=lost, non_retryable=True))
    assert (decision.phase, decision.counts[(Role.DECODE, "new")]) == (Phase.FAILED, 0)


def test_a_failed_revision_stays_back_until_the_spec_changes():
    """The same spec is not tried again; another one is."""
    failed = view({"old": seen(2)}, {"old": seen(2)})
    token = token_of(failed)
    memory = RolloutStatus(
        targets={"prefill": "new", "decode": "new", "router": "r"}, stable=OLD, failed=token
    )
    assert decide(msgspec.structs.replace(failed, memory=memory)).phase is Phase.FAILED
    other = view({"old": seen(2)}, {"old": seen(2)}, target="newer")
    assert decide(msgspec.structs.replace(other, memory=memory)).phase is Phase.PILOT


def test_going_back_to_the_stable_revision_is_immediate():
    """A spec that is taken back half-way restores the old counts without a pilot."""
    half = {"old": seen(1), "new": seen(1)}
    decision = decide(view(half, half, target="old"))
    assert decision.phase is Phase.STABLE
    assert counts(decision) == {"p:old": 2, "p:new": 0, "d:old": 2, "d:new": 0, "r:r": 1}


def test_a_third_revision_replaces_the_second():
    """A change in the middle of a rollout: what was half-way goes first, the stable one serves."""
    half = {"old": seen(1), "new": seen(1)}
    decision = decide(view(half, half, target="newer"))
    assert decision.counts[(Role.DECODE, "new")] == 0
    assert decision.counts[(Role.DECODE, "old")] == 2
    assert decision.counts[(Role.DECODE, "newer")] == 1


def test_a_pause_keeps_both_revisions():
    """Paused: counts stay as they are, and no deadline runs."""
    half = {"old": seen(1), "new": seen(1, 0)}
    late = time_text(NOW - 9999)
    memory = RolloutStatus(
        targets={"prefill": "new", "decode": "new", "router": "r"}, stable=OLD, progressed_at=late
    )
    decision = decide(view(half, half, paused=True, memory=memory))
    assert decision.phase is Phase.PAUSED
    assert counts(decision) == {"p:old": 1, "p:new": 1, "d:old": 1, "d:new": 1, "r:r": 1}


@pytest.mark.parametrize("held_by", ["paused", "suspended", "non_retryable"])
def test_the_deadline_begins_anew_after_a_rest(held_by: str):
    """A rollout that was paused or suspended for longer than its deadline goes on where it was."""
    both = {"old": seen(2), "new": seen(1, 0)}
    memory = RolloutStatus(
        targets={"prefill": "new", "decode": "new", "router": "r"},
        stable=OLD,
        progressed_at=time_text(NOW - 9999),
    )
    rest = view(both, both, memory=memory)
    rested = decide(msgspec.structs.replace(rest, **{held_by: True}))
    after = decide(msgspec.structs.replace(rest, memory=rested.memory, now=NOW + 9999))
    assert after.phase is Phase.PILOT
    assert after.memory.progressed_at == time_text(NOW + 9999)


def test_what_is_made_suspended_has_its_whole_deadline_on_resume():
    """A first revision waits for its pods from the moment that they may be there."""
    made = view({}, {}, stable={}, suspended=True)
    rested = decide(made)
    resumed = view({}, {}, stable={}, memory=rested.memory, now=NOW + 9999)
    decision = decide(resumed)
    assert (decision.phase, decision.memory.failed) == (Phase.FIRST, None)
    late = msgspec.structs.replace(resumed, memory=decision.memory, now=NOW + 9999 + 1201)
    assert decide(late).phase is Phase.FAILED


def test_pods_that_are_back_after_suspension_are_progress():
    """As many as were ready before count again, each as it comes."""
    targets = {"prefill": "new", "decode": "new", "router": "r"}
    memory = RolloutStatus(targets=targets, stable=OLD, progressed_at=time_text(NOW), ready=5)
    rested = decide(view({}, {}, suspended=True, memory=memory)).memory
    one = {"new": seen(1)}
    begun = decide(view(one, one, memory=rested, now=NOW + 5000)).memory
    two = {"new": seen(2)}
    on = decide(view(two, two, memory=begun, now=NOW + 6000)).memory
    assert on.progressed_at == time_text(NOW + 6000)


def test_suspension_takes_every_pod_and_forgets_nothing():
    """Suspended: all counts are zero, the stable revision is remembered."""
    decision = decide(view({"old": seen(2)}, {"old": seen(2)}, suspended=True))
    assert set(decision.counts.values()) == {0}
    assert decision.memory.stable == OLD


def test_scaling_goes_on_while_nothing_rolls():
    """New counts reach the stable revision at once."""
    stable = {"prefill": "old", "decode": "old", "router": "r"}
    now = view({"old": seen(2)}, {"old": seen(2)}, target="old", desired=(3, 5), stable=stable)
    assert counts(decide(now)) == {"p:old": 3, "d:old": 5, "r:r": 1}


def test_progress_holds_the_deadline_off():
    """The deadline runs from the last progress, not from the start."""
    targets = {"prefill": "new", "decode": "new", "router": "r"}
    memory = RolloutStatus(targets=targets, stable=OLD, progressed_at=time_text(NOW - 50), ready=1)
    now = view({"new": seen(1), "old": seen(2)}, {"old": seen(2)}, memory=memory, deadline=60.0)
    after = decide(now).memory
    assert after.ready == 2
    assert after.progressed_at == time_text(NOW)
    assert after.failed is None
    late = msgspec.structs.replace(now, memory=after, now=NOW + 61)
    assert decide(late).memory.failed == service_revision(targets)


def test_old_workers_stay_until_the_old_routers_are_gone():
    """At the end of a rollout of all roles a leaving router still has its own workers."""
    gone = RevisionView(asked=0, ready=0, present=0)
    leaving = RevisionView(asked=0, ready=0, present=1)
    whole = {"old": seen(1), "new": seen(1)}
    now = view(whole, whole, desired=(1, 1), stable={**OLD, "router": "before"}, canary_ok=True)
    phases = []
    for before, left in ((seen(1, present=1), 1), (leaving, 1), (gone, 0)):
        router = RoleView(desired=1, target="r", revisions={"before": before, "r": seen(1)})
        at = msgspec.structs.replace(now, roles={**now.roles, Role.ROUTER: router})
        decision = decide(at)
        phases.append(decision.phase)
        for role in (Role.PREFILL, Role.DECODE):
            assert decision.counts.get((role, "old"), 0) == left
            assert decision.counts[(role, "new")] == 1
        assert decision.counts[(Role.ROUTER, "before")] == 0
    assert phases == [Phase.ROLLING, Phase.ROLLING, Phase.STABLE]
