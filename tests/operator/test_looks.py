"""Looks at one service in order, on a cluster in memory: what one leaves to the next."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest
from tests.operator.builders import service
from tests.operator.in_memory import KEY, Demo
from tests.waiting import wait_for

from tandem.operator.api.status import LLMServiceStatus
from tandem.operator.rehearse.rehearsal import ToldProbes


def test_a_repair_makes_no_job_that_was_not_accepted(demo: Callable[..., Demo]):
    """Who deletes the Job, as messages advise, gets none that reads a Secret without leave."""
    served = demo()
    served.cluster.put("Secret", {"metadata": {"name": "theirs"}, "data": {}})
    theirs = {"valueFrom": {"secretKeyRef": {"name": "theirs", "key": "a"}}}
    fetch = {"name": "fetch", "image": "mine", "env": [{"name": "HTTP_PROXY", **theirs}]}
    served.change(decode__podTemplate={"spec": {"initContainers": [fetch]}})
    served.turn()
    assert served.condition("Accepted")[:2] == ("False", "SecretNotAllowed")
    (job,) = served.cluster.of("Job")
    served.cluster.delete("Job", KEY[0], job["metadata"]["name"])
    served.woken.clear()
    served.repairs.child_changed(KEY, job, deleted=True)
    wait_for(lambda: served.woken)
    assert served.cluster.of("Job") == []


@pytest.mark.parametrize("is_another", [False, True], ids=["the same operator", "another"])
def test_a_canary_from_before_a_suspension_says_nothing_of_the_pods_after_it(
    demo: Callable[..., Demo], is_another: bool
):
    """Servable and Ready come when the new pods were asked, and not before."""
    served = demo()
    served.change(suspend=True)
    served.turn(2)
    assert served.condition("Servable")[:2] == ("False", "Suspended")
    if is_another:
        served.succeed()
    served.probes.is_right = False
    served.change()
    served.turn()
    assert served.condition("Servable")[:2] == ("Unknown", "CanaryPending")
    assert served.condition("Ready")[:2] == ("False", "Starting")
    served.turn()
    assert served.condition("Ready")[:2] == ("False", "CanaryPending")
    served.turn()
    assert served.condition("Ready")[:2] == ("False", "CanaryFailed")
    said = [(each["reason"], each["message"][:8]) for each in served.cluster.events]
    assert [each for each in said if each[0] == "CanaryOK"] == [("CanaryOK", "Servable")]


def test_a_service_that_is_made_again_is_asked_itself(demo: Callable[..., Demo]):
    """What was known of the former of its name counts for nothing, though no look saw it gone."""
    served = demo()
    for kind, name in list(served.cluster.objects):
        served.cluster.delete(kind, KEY[0], name)
    served.cluster.put("LLMService", service())
    served.probes.is_right = False
    served.turn()
    assert "stable" not in served.status()["rollout"]
    assert served.condition("Servable")[:2] == ("Unknown", "CanaryPending")
    served.turn(2)
    assert served.condition("Ready")[:2] == ("False", "CanaryFailed")


def test_a_rehearsal_of_a_resumption_knows_no_canary_either(demo: Callable[..., Demo]):
    """Of a suspended service nothing is told that pods to come could be judged by."""
    served = demo()
    for suspended, known in ((False, 1), (True, 0)):
        served.change(suspend=suspended)
        served.turn()
        status = msgspec.convert(served.status(), LLMServiceStatus)
        assert len(ToldProbes(status).known(KEY).asked) == known


def test_a_change_that_comes_with_the_answer_to_a_status_is_not_missed(demo: Callable[..., Demo]):
    """The spec changes while a look goes on: the answer to its status brings that, and the event is
    older than the answer, so that nobody is woken by it."""
    served = demo()
    assert served.look() == 60.0
    served.change(decode__replicas=2)
    served.change(decode__replicas=3, heard=False)
    assert served.look() == 0.0
    served.look()
    assert list(served.replicas("decode").values()) == [3]


def test_nor_is_one_that_mends_what_could_not_be_read(demo: Callable[..., Demo]):
    served = demo()
    served.change(decode__replicas="many")
    served.change(decode__replicas=3, heard=False)
    assert served.look() == 0.0
    served.change(decode__replicas="many")
    assert served.look() is None


def test_nor_is_what_an_autoscaler_asks_for(demo: Callable[..., Demo]):
    """The same with what /scale shows of a role."""
    served = demo(decode__scaling={"mode": "External", "maxReplicas": 9})
    (scaler,) = served.cluster.of("LLMRoleScaler")
    scaler["spec"]["replicas"] = 2
    served.cluster.put("LLMRoleScaler", scaler)
    scaler["spec"]["replicas"] = 3
    served.cluster.put("LLMRoleScaler", scaler, heard=False)
    assert served.look() == 0.0
    served.look()
    assert list(served.replicas("decode").values()) == [3]


def test_new_keys_are_asked_for_soon(demo: Callable[..., Demo]):
    """The look that publishes them asks nobody yet, and no event brings the next: a rotation began
    with the next canary, up to a minute later."""
    served = demo()
    served.turn(3)
    served.change(security__keyRotationID="a")
    again = served.look()
    assert served.condition("Progressing")[1] == "WaitingForKeys"
    assert again is not None
    assert again <= 5.0
    served.turn(8)
    assert served.condition("Progressing")[1] == "Stable"
    assert served.status()["keys"]["read"] == 2


def test_a_pod_that_was_to_leave_takes_nobodys_place_until_its_controller_keeps_it(
    demo: Callable[..., Demo],
):
    """The spec is taken back behind a scaling down that its controller may have acted upon: the
    pods that it deletes meanwhile were counted as staying, and the others were given up."""
    served = demo()
    (first,) = served.replicas("decode")
    served.change(engine__maxNumSeqs=3)
    served.look()
    while served.replicas("decode")[first]:
        served.cluster.run()
        served.look()
    served.change()
    for _ in range(4):  # no controller has done anything meanwhile
        served.look()
    (second,) = served.replicas("decode").keys() - {first}
    assert served.replicas("decode") == {first: 1, second: 1}
    served.turn(8)
    assert served.replicas("decode").get(second, 0) == 0
    assert served.replicas("decode")[first] == 1
    assert not served.marked()


BUILDERS = {
    "Model.digest",
    "_account",
    "_budget",
    "base",
    "deployment",
    "model_job",
    "network_policies",
    "peers",
    "revision_of",
    "router_role",
    "router_template",
    "stored_template",
    "worker_template",
}
"""Functions that render a child, by their qualified names without wrappers."""


def calls_of_a_look(served: Demo) -> Counter[str]:
    """Return how often a look called each builder with each role."""
    found: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        name, file = frame.f_code.co_qualname, frame.f_code.co_filename
        if event == "call" and name in BUILDERS and "/tandem/operator/" in file:
            given = frame.f_locals.get("role", frame.f_locals.get("component", ""))
            found[f"{name} {given}".strip()] += 1

    sys.setprofile(enter)
    try:
        served.look()
    finally:
        sys.setprofile(None)
    return found


def test_a_look_that_writes_nothing_renders_each_child_once(demo: Callable[..., Demo]):
    served = demo()
    served.turn(2)
    found = calls_of_a_look(served)
    assert {name.split()[0] for name in found} == BUILDERS
    assert found == dict.fromkeys(found, 1)


def test_a_look_at_a_new_revision_renders_each_pod_template_once(demo: Callable[..., Demo]):
    served = demo()
    served.turn(2)
    served.change(decode__drainTimeoutSeconds=9)
    found = calls_of_a_look(served)
    templates = ("router_template", "worker_template decode", "worker_template prefill")
    assert [found[name] for name in templates] == [1, 1, 1]
