"""Whom canaries ask while revisions change, and what a service says of itself meanwhile."""

from __future__ import annotations

import socket
from queue import Queue
from typing import Any

import msgspec
from tests.operator.builders import spec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import (
    Condition,
    ConditionType,
    Keys,
    LLMServiceStatus,
    ModelStatus,
    Reason,
    RolloutStatus,
)
from tandem.operator.clock import time_text
from tandem.operator.decide.modelcheck import ModelVerdict
from tandem.operator.decide.observe import PodView, Problem
from tandem.operator.decide.plan import judged, serving
from tandem.operator.decide.rollout import Decision, Phase
from tandem.operator.decide.scaling import Wanted
from tandem.operator.decide.status import StatusInputs, next_status
from tandem.operator.decide.words import Verdict
from tandem.operator.desired.naming import Identity, Role
from tandem.operator.desired.revision import service_revision
from tandem.operator.probes.canary import Question
from tandem.operator.probes.probing import Probes

NOW = 1_800_000_000.0
OLD = {"prefill": "p1", "decode": "d1", "router": "r"}
NEW = {"prefill": "p2", "decode": "d2", "router": "r"}
OLD_NAME, NEW_NAME = service_revision(OLD), service_revision(NEW)


def decided(phase: Phase, **memory: Any) -> Decision:
    """A decision on the way from OLD to NEW."""
    remembered = RolloutStatus(**{"targets": NEW, "stable": OLD, **memory})
    return Decision(phase=phase, counts={}, memory=remembered, admitted=set())


def verdict(targets: str, reason: Reason, message: str) -> Verdict:
    ok = reason is Reason.CANARY_OK
    return Verdict(ok=ok, reason=reason, message=message, targets=targets, at=NOW)


def test_old_and_new_revisions_are_asked_until_the_new_ones_are_given_up():
    """In a rollout both are asked; what failed is left alone."""
    assert set(judged(decided(Phase.PILOT))) == {OLD_NAME, NEW_NAME}
    assert judged(decided(Phase.FAILED)) == {OLD_NAME: {Role(r): n for r, n in OLD.items()}}
    assert set(judged(decided(Phase.FIRST, stable={}))) == {NEW_NAME}


def test_clients_meet_the_old_revision_until_the_canary_was_right_on_the_new_one():
    """What Servable speaks of changes with the canary's word, and not before."""
    assert serving(decided(Phase.PILOT)) == OLD_NAME
    assert serving(decided(Phase.ROLLING, servable=NEW_NAME)) == NEW_NAME
    assert serving(decided(Phase.FAILED, servable=NEW_NAME)) == OLD_NAME
    assert serving(decided(Phase.FIRST, stable={})) == NEW_NAME


def test_each_set_of_revisions_has_a_verdict_of_its_own():
    """Both are asked at once, and what is not asked about any more is forgotten."""
    woken: Queue[tuple[str, str]] = Queue()
    probes = Probes(60.0, woken.put)
    key = ("ns", "demo")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]  # bound and not listening: refused at once
        asked = [question(port, OLD_NAME), question(port, NEW_NAME)]
        assert probes.poll(key, asked, about={OLD_NAME, NEW_NAME}, links=1) == 60.0
        for _ in asked:
            assert woken.get(timeout=20) == key
    found = [probes.known(key).verdict(name) for name in (OLD_NAME, NEW_NAME)]
    assert [(each.targets, each.reason) for each in found if each is not None] == [
        (OLD_NAME, Reason.CANARY_FAILED),
        (NEW_NAME, Reason.CANARY_FAILED),
    ]
    assert probes.known(key).servable() == frozenset()
    assert probes.poll(key, [], about={OLD_NAME}, links=1) is None
    assert probes.known(key).verdict(NEW_NAME) is None
    assert probes.known(key).verdict(OLD_NAME) is not None
    probes.close()


def question(port: int, targets: str) -> Question:
    """A question to a port of this machine."""
    return Question(
        base_url=f"http://127.0.0.1:{port}",
        model="smollm2",
        token="secret",
        targets=targets,
        prefill_revision="p",
        decode_revision="d",
    )


def inputs(decision: Decision, **more: Any) -> StatusInputs:
    """A service whose old pods are all up."""
    pods = [
        PodView(
            name=f"{role}-0",
            uid=role,
            ip="10.0.0.1",
            role=Role(role),
            revision=name,
            ready=True,
            deleting=False,
            created=NOW,
            pending_since=None,
            problem=None,
            annotations={},
            key_generation=1,
        )
        for role, name in OLD.items()
    ]
    whole = StatusInputs(
        owner=Identity("ns", "demo", "uid"),
        spec=msgspec.convert(spec(), LLMServiceSpec),
        generation=2,
        url="http://demo",
        accepted=("True", Reason.ACCEPTED, ""),
        model=ModelVerdict(
            ready=True,
            reason=Reason.MODEL_READY,
            message="there",
            status=ModelStatus(),
            may_start=True,
        ),
        decision=decision,
        wanted={role: Wanted(replicas=1) for role in Role},
        pods=pods,
        workloads={},
        keys=Keys(),
        key_wait=0.0,
        canary=None,
        pilot=None,
        links=None,
        now=NOW,
        unschedulable_seconds=60.0,
    )
    return msgspec.structs.replace(whole, **more)


def words(status: LLMServiceStatus) -> dict[str, Condition]:
    return {each.type: each for each in status.conditions}


def test_a_pilot_that_fails_leaves_the_service_ready():
    """What serves is Ready; the new revision's trouble is told by Progressing."""
    good = verdict(OLD_NAME, Reason.CANARY_OK, "came back")
    bad = verdict(NEW_NAME, Reason.CANARY_FAILED, "HTTP 503: no worker")
    found = words(next_status(inputs(decided(Phase.PILOT), canary=good, pilot=bad), memory()))
    assert found[ConditionType.READY].status == "True"
    assert found[ConditionType.SERVABLE].status == "True"
    progressing = found[ConditionType.PROGRESSING]
    assert (progressing.status, progressing.reason) == ("True", Reason.ROLLING_OUT)
    assert "no worker" in (progressing.message or "")


def test_another_leader_does_not_make_a_service_unready():
    """As long as a new leader has not asked, the last canary's word holds."""
    said = Condition(
        type=ConditionType.SERVABLE,
        status="True",
        reason=Reason.CANARY_OK,
        message="came back",
        last_transition_time=time_text(NOW - 100),
    )
    stable = decided(Phase.STABLE, targets=OLD, servable=OLD_NAME)
    found = words(next_status(inputs(stable), memory(conditions=[said])))
    assert found[ConditionType.READY].status == "True"
    fresh = words(next_status(inputs(stable), memory()))
    assert fresh[ConditionType.SERVABLE].reason == Reason.CANARY_PENDING


def test_a_model_that_is_looked_at_first_is_a_rollout_under_way():
    """Between a new model source and its first pod a service says that something goes on."""
    checking = ModelVerdict(
        ready=False,
        reason=Reason.CHECKING,
        message="the Job reads it",
        status=ModelStatus(),
        may_start=False,
    )
    good = verdict(OLD_NAME, Reason.CANARY_OK, "came back")
    stable = decided(Phase.STABLE, targets=OLD, servable=OLD_NAME)
    found = words(next_status(inputs(stable, model=checking, canary=good), memory()))
    progressing = found[ConditionType.PROGRESSING]
    assert (progressing.status, progressing.reason) == ("True", Reason.CHECKING)
    assert found[ConditionType.READY].status == "True"
    suspended = decided(Phase.SUSPENDED, targets=OLD, servable=OLD_NAME)
    found = words(next_status(inputs(suspended, model=checking), memory()))
    assert found[ConditionType.PROGRESSING].status == "False"


def test_why_a_revision_was_taken_back_is_told_for_as_long_as_it_is():
    """Its pods go with it, and its canary is asked no more; the words stay while it is failed."""
    failed = decided(Phase.FAILED, failed=NEW_NAME)
    base = inputs(failed, canary=verdict(OLD_NAME, Reason.CANARY_OK, "came back"))
    pilot = msgspec.structs.replace(
        base.pods[1],
        revision="d2",
        ready=False,
        problem=Problem(Reason.IMAGE_PULL, "no such image"),
    )
    seen = msgspec.structs.replace(
        base,
        pods=[*base.pods, pilot],
        pilot=verdict(NEW_NAME, Reason.CANARY_FAILED, "HTTP 503"),
    )
    first = next_status(seen, memory())
    told = words(first)[ConditionType.DEGRADED].message
    assert "no such image" in told
    assert "HTTP 503" in told
    going = msgspec.structs.replace(base, pods=[*base.pods, pilot])
    for later in (words(next_status(each, first)) for each in (going, base)):
        assert later[ConditionType.DEGRADED].message == told
        assert later[ConditionType.PROGRESSING].message == told
    other = msgspec.structs.replace(failed.memory, failed="another")
    anew = msgspec.structs.replace(base, decision=msgspec.structs.replace(failed, memory=other))
    assert "no such image" not in words(next_status(anew, first))[ConditionType.DEGRADED].message


def test_why_a_revision_was_taken_back_is_its_own_trouble():
    """Not that of the pods of the stable one, which come up again."""
    crash = Problem(Reason.CRASH_LOOP, "an old worker crashes")
    base = inputs(decided(Phase.FAILED, failed=NEW_NAME))
    pods = [msgspec.structs.replace(each, ready=False, problem=crash) for each in base.pods[:2]]
    found = words(next_status(msgspec.structs.replace(base, pods=pods), memory()))
    assert "an old worker" not in found[ConditionType.DEGRADED].message
    assert "an old worker" in found[ConditionType.DECODE_READY].message


def test_routers_that_clients_do_not_reach_make_nothing_ready():
    """The Service selects routers of one revision: those of another answer nobody."""
    good = verdict(OLD_NAME, Reason.CANARY_OK, "came back")
    rolling = decided(Phase.PILOT)
    for routers, ready in (("r", "True"), ("another", "False")):
        decision = msgspec.structs.replace(rolling, routers=routers)
        status = next_status(inputs(decision, canary=good), memory())
        assert words(status)[ConditionType.READY].status == ready
        assert words(status)[ConditionType.ROUTER_READY].status == ready
        assert (status.mode is None, status.summary.router) == (
            (False, "1/1") if ready == "True" else (True, "0/1")
        )


def memory(**more: Any) -> LLMServiceStatus:
    return LLMServiceStatus(**more)
