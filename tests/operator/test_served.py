"""A spec that changes once more during a rollout: what serves goes on until others serve there."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import Phase as Draw
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.rollout_sim import Sim, Spec
from tests.operator.test_decisions import OWNER, typed
from tests.operator.test_rollout import NOW, OLD, counts, seen, view

from tandem.operator.api.service import Surge
from tandem.operator.api.status import LLMServiceStatus, RolloutStatus
from tandem.operator.clock import time_text
from tandem.operator.decide.answered import RoleView, RolloutView
from tandem.operator.decide.observe import Snapshot
from tandem.operator.decide.plan import decision as decided
from tandem.operator.decide.plan import judged, remembered, see, serving
from tandem.operator.decide.rollout import Decision, Phase, decide
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.revision import service_revision
from tandem.operator.desired.workload import deployment, rendered
from tandem.operator.settings import OperatorSettings
from tandem.protocol.names import ANNOTATION_DRAINING

NEW = {"prefill": "new", "decode": "new", "router": "r"}
ROLLING = RolloutStatus(targets=NEW, stable=OLD, servable=service_revision(NEW))
"""What was new answered the canary, and has the places of some old pods."""
HALF = (({"old": seen(3), "new": seen(1)}), {"old": seen(0), "new": seen(1)})
"""Prefill has one new worker of four, decode's only one is new."""


def half(target: str, **more: Any) -> RolloutView:
    """Another target in the middle of a rollout."""
    return view(*HALF, desired=(4, 1), target=target, **{"memory": ROLLING, **more})


def test_a_third_revision_takes_no_place_of_a_second_that_serves():
    """The only decode worker is of revisions that are left: it stays, admitted, and its Deployment
    with it, until the third is there."""
    decision = decide(half("newer"))
    assert counts(decision) == {
        "p:old": 3, "p:new": 1, "p:newer": 1, "d:old": 0, "d:new": 1, "d:newer": 1, "r:r": 1
    }  # fmt: skip
    assert decision.phase is Phase.PILOT
    assert (Role.DECODE, "new") in decision.admitted
    assert (Role.DECODE, "new") in remembered(decision)
    assert decision.memory.served == [NEW]
    assert serving(decision) == service_revision(NEW)  # of whom Servable speaks, and who is asked
    assert judged(decision).keys() >= {service_revision(NEW), service_revision(OLD)}


def test_what_was_stable_takes_its_places_back_when_it_is_ready_in_them():
    """A spec that is taken back: the old revision needs no canary, and the new one no longer has a
    replica once the old one has all of them."""
    decision = decide(half("old"))
    assert decision.phase is Phase.ROLLING
    assert counts(decision) == {"p:old": 4, "p:new": 1, "d:old": 1, "d:new": 1, "r:r": 1}
    up = ({"old": seen(4), "new": seen(1)}, {"old": seen(1), "new": seen(1)})
    done = decide(view(*up, desired=(4, 1), target="old", memory=decision.memory))
    gone = {"p:old": 4, "p:new": 0, "d:old": 1, "d:new": 0, "r:r": 1}
    assert (done.phase, counts(done), done.memory.served) == (Phase.STABLE, gone, [])


def test_pods_that_do_not_serve_make_way_at_once_for_what_was_stable():
    """Nothing is lost by a new worker that crashes."""
    down = ({"old": seen(1), "new": seen(3, 0)}, {"old": seen(1), "new": seen(0)})
    decision = decide(view(*down, desired=(4, 1), target="old", memory=ROLLING))
    assert counts(decision) == {"p:old": 4, "p:new": 0, "d:old": 1, "d:new": 0, "r:r": 1}


def test_a_second_revision_that_never_answered_is_gone_at_once():
    """Without the canary's word it serves nobody."""
    memory = msgspec.structs.replace(ROLLING, servable=None)
    decision = decide(half("newer", memory=memory))
    assert (counts(decision)["d:new"], counts(decision)["d:old"]) == (0, 1)
    assert (Role.DECODE, "new") not in decision.admitted


def test_a_second_revision_is_taken_up_again_without_a_canary():
    """B, then C, then B again: B answered."""
    other = decide(half("newer"))
    decision = decide(half("new", memory=other.memory))
    assert (decision.phase, decision.memory.served) == (Phase.ROLLING, [])
    assert (Role.DECODE, "new") in decision.admitted


def test_a_third_revision_that_fails_leaves_the_second_until_the_stable_one_is_back():
    """The stable one has no decode worker at that moment."""
    memory = decide(half("newer")).memory
    failed = msgspec.structs.replace(memory, failed=service_revision(memory.targets))
    decision = decide(half("newer", memory=failed))
    assert decision.phase is Phase.FAILED
    assert counts(decision) == {"p:old": 4, "p:new": 1, "d:old": 1, "d:new": 1, "r:r": 1}


def test_ready_pods_go_last():
    decode = {"old": seen(2, 1), "new": seen(1)}
    two = {"old": seen(1), "new": seen(1)}
    decision = decide(view(two, decode, target="newer", memory=ROLLING))
    assert (counts(decision)["d:old"], counts(decision)["d:new"]) == (1, 1)


def test_what_was_stable_is_given_room_when_it_finds_none():
    """It comes back behind a third revision that failed, where the second has its places."""
    memory = decide(half("newer")).memory
    failed = msgspec.structs.replace(memory, failed=service_revision(memory.targets))
    two = {"old": seen(1, 0, stuck=True), "new": seen(2)}
    decision = decide(view(two, two, target="newer", memory=failed))
    assert decision.memory.in_place
    assert (counts(decision)["d:old"], counts(decision)["d:new"]) == (1, 1)


def test_without_room_the_second_revision_gives_way():
    """In place the pods that come need the places of those that serve."""
    two = ({"old": seen(0), "new": seen(2)}, {"old": seen(0), "new": seen(2)})
    decision = decide(view(*two, target="old", memory=ROLLING, surge=Surge.NEVER))
    assert counts(decision) == {"p:old": 1, "p:new": 1, "d:old": 1, "d:new": 1, "r:r": 1}
    one = decide(half("old", surge=Surge.NEVER))
    assert (counts(one)["d:new"], counts(one)["d:old"], one.gap) == (0, 1, True)


OTHER = {"prefill": "new", "decode": "new", "router": "r2"}


def routers(target: str, old: int, new: int, **more: Any) -> Decision:
    """Another model in the middle of a rollout of another model; ``old`` and ``new`` routers are
    ready."""
    memory = RolloutStatus(targets=OTHER, stable=OLD, servable=service_revision(OTHER))
    workers = {"old": seen(1), "new": seen(1)}
    now = view(workers, workers, target=target, **{"memory": memory, **more})
    name = {"old": "r", "new": "r2", "newer": "r3"}[target]
    there = {"r": seen(old, present=old), "r2": seen(new, present=new)}
    role = RoleView(desired=2, target=name, revisions=there)
    return decide(msgspec.structs.replace(now, roles={**now.roles, Role.ROUTER: role}))


@pytest.mark.parametrize("paused", [False, True])
def test_clients_stay_with_routers_that_are_there(paused: bool):
    """Routers rolled first, and the old ones are gone: those of the second revision are reached."""
    decision = routers("newer", 0, 2, paused=paused)
    assert decision.routers == "r2"
    assert counts(decision)["r:r2"] == 2
    assert decision.met == OTHER
    assert routers("newer", 2, 0, paused=paused).routers == "r"


def test_routers_without_workers_of_theirs_are_not_reached():
    """Two models: the old routers are back before their workers are."""
    memory = RolloutStatus(targets=OTHER, stable=OLD, servable=service_revision(OTHER))
    begun = decide(routers_view(decode={"old": seen(0), "new": seen(2)}, memory=memory))
    assert begun.routers == "r2"
    assert counts(begun)["r:r2"] == 1  # though the old ones are all back
    back = decide(routers_view(decode={"old": seen(1), "new": seen(2)}, memory=begun.memory))
    assert back.routers is None  # both have some


def test_new_routers_wait_for_their_workers_after_a_suspension():
    """All pods of a rollout come up anew: those that are new load for longer than their routers,
    and clients and the old router stay together meanwhile."""
    memory = RolloutStatus(targets=OTHER, stable=OLD, servable=service_revision(OTHER))
    workers = {"old": seen(1), "new": seen(1, 0)}
    now = view(workers, workers, memory=memory)
    there = {"r": seen(1, present=1), "r2": seen(1, present=1)}
    role = RoleView(desired=1, target="r2", revisions=there)
    decision = decide(msgspec.structs.replace(now, roles={**now.roles, Role.ROUTER: role}))
    assert (decision.phase, decision.routers) == (Phase.ROLLING, "r")
    assert counts(decision)["r:r"] == 1


def test_a_role_that_has_rolled_waits_for_no_other():
    """Decode's only worker is new and ready: the old one goes while prefill is on its way."""
    decode = {"old": seen(1), "new": seen(1)}
    decision = decide(view(HALF[0], decode, desired=(4, 1), memory=ROLLING))
    assert (counts(decision)["d:old"], counts(decision)["d:new"]) == (0, 1)


def test_each_leaving_router_keeps_a_worker_of_its_set():
    """The third revision is all there, and routers of the first and the second still answer."""
    third = {"prefill": "newer", "decode": "newer", "router": "r3"}
    memory = RolloutStatus(
        targets=third, stable=OLD, served=[OTHER], servable=service_revision(third)
    )
    workers = {"old": seen(1), "new": seen(1), "newer": seen(2)}
    now = view(workers, workers, target="newer", memory=memory)
    leaving = seen(0, present=1)
    there = {"r": leaving, "r2": leaving, "r3": seen(1, present=1)}
    role = RoleView(desired=1, target="r3", revisions=there)
    decision = decide(msgspec.structs.replace(now, roles={**now.roles, Role.ROUTER: role}))
    assert decision.phase is Phase.ROLLING
    assert (counts(decision)["d:old"], counts(decision)["d:new"]) == (1, 1)


def routers_view(decode: dict[str, Any], memory: RolloutStatus) -> RolloutView:
    """What was stable is asked for again, and has two routers."""
    now = view({"old": seen(1), "new": seen(1)}, decode, target="old", memory=memory)
    there = {"r": seen(2, present=2), "r2": seen(2, present=2)}
    role = RoleView(desired=2, target="r", revisions=there)
    return msgspec.structs.replace(now, roles={**now.roles, Role.ROUTER: role})


def test_a_pause_without_pods_restores_what_was_stable():
    """Suspended in the middle of a rollout, and started again while it is paused."""
    targets = {"prefill": "new", "decode": "new", "router": "r"}
    none = {"old": seen(0), "new": seen(0)}
    memory = RolloutStatus(targets=targets, stable=OLD)
    decision = decide(view(none, none, memory=memory, paused=True))
    assert decision.phase is Phase.PAUSED
    assert counts(decision) == {"p:old": 2, "p:new": 0, "d:old": 2, "d:new": 0, "r:r": 1}


def second_of_decode(*, leaves: bool, asked: int = 1) -> int:
    """Replicas of a second revision's decode workers after the spec was taken back, while a pod of
    the first is ready."""
    old, new = (
        Facts(owner=OWNER, spec=typed(**changes), settings=OperatorSettings())
        for changes in ({}, {"engine__maxNumSeqs": 3})
    )
    revisions = {role: (old.revision(role), new.revision(role)) for role in Role}
    targets = {str(role): after for role, (_, after) in revisions.items()}
    memory = RolloutStatus(
        targets=targets,
        stable={str(role): before for role, (before, _) in revisions.items()},
        servable=service_revision(targets),
    )
    deployments: dict[str, Manifest] = {}
    pods: dict[str, Manifest] = {}
    for role, names_of in revisions.items():
        for at, name in enumerate(dict.fromkeys(names_of)):
            first = role is Role.DECODE and at == 0
            each = deployment(old, role, name, asked if first else 1, rendered(old, role))
            deployments[each["metadata"]["name"]] = each
            marks = {ANNOTATION_DRAINING: "true"} if first and leaves else {}
            pods[f"{role}-{at}"] = ready_pod(f"{role}-{at}", each, marks)
    live = Snapshot({"Deployment": deployments, "Pod": pods})
    all_seen = see(OWNER, 3, old.spec, LLMServiceStatus(rollout=memory), live)
    found = decided(all_seen, old, may_move=True, servable=frozenset(), now=NOW)
    return found.counts[(Role.DECODE, revisions[Role.DECODE][1])]


def ready_pod(name: str, of: Manifest, annotations: dict[str, str]) -> Manifest:
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "labels": of["metadata"]["labels"],
            "annotations": annotations,
            "creationTimestamp": time_text(NOW),
        },
        "spec": {},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


def test_a_pod_that_is_about_to_leave_takes_nobodys_place():
    """Its Deployment shrank, and the controller may have deleted it since it was read."""
    assert second_of_decode(leaves=False) == 0
    assert second_of_decode(leaves=True) == 1
    assert second_of_decode(leaves=False, asked=0) == 1


SPECS = st.builds(
    Spec,
    model=st.sampled_from("aaab"),
    prefill=st.integers(0, 2),
    decode=st.integers(0, 2),
    router=st.sampled_from([0, 0, 1]),
    bad=st.sampled_from([False, False, False, True]),
)
EVENTS = st.one_of(SPECS, SPECS, SPECS, st.sampled_from(["crash", "pause", "suspend"]))
LOOKS = st.integers(1, 9)
"""Looks until the next event: some come in the middle of a rollout."""


@settings(max_examples=40, deadline=None, phases=[each for each in Draw if each != Draw.shrink])
@given(
    desired=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 3)),
    spare=st.sampled_from([0, 1, 9]),
    surge=st.sampled_from([Surge.AUTO, Surge.NEVER]),
    seed=st.integers(0, 2**32),
    events=st.lists(st.tuples(EVENTS, LOOKS), min_size=3, max_size=8),
)
def test_what_serves_is_never_taken_away_and_all_ends_with_one_set(
    desired: tuple[int, int, int], spare: int, surge: Surge, seed: int, events: list[Any]
):
    """Whatever changes, and in whatever order pods come up, crash and leave. In place a role of one
    replica has a gap, which is told."""
    roles = dict(zip((Role.PREFILL, Role.DECODE, Role.ROUTER), desired, strict=True))
    room = {role: count + spare for role, count in roles.items()} | {Role.ROUTER: 99}
    sim = Sim(roles, room, random.Random(seed), surge=surge)
    single = 1 in (roles[Role.DECODE], roles[Role.ROUTER])
    settle(sim)
    for event, looks in events:
        happen(sim, event)
        for _ in range(looks):
            served = sim.serves()
            decision = sim.look()
            excused = sim.suspended or (decision.memory.in_place and single)
            assert sim.serves() or not served or excused
            sim.tick()
    sim.paused = sim.suspended = False
    settle(sim)


def happen(sim: Sim, event: Any) -> None:
    match event:
        case Spec():
            sim.spec = event
        case "crash":
            sim.crash()
        case "pause":
            sim.paused = not sim.paused
        case "suspend":
            sim.suspended = not sim.suspended


def settle(sim: Sim) -> None:
    """Look until all pods are of one set; the last spec's, or what was stable if that is bad."""
    decision = sim.look()
    for _ in range(600):
        if sim.is_settled(decision) and decision.phase in (Phase.STABLE, Phase.FAILED):
            return
        sim.tick()
        decision = sim.look()
    raise AssertionError(f"never settled: {decision}")
