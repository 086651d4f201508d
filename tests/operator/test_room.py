"""Pods of a new revision take the place of old ones where a quota has no room beside them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.test_decisions import NOW, OWNER, typed

from tandem.operator.api.status import LLMServiceStatus, RolloutStatus
from tandem.operator.clock import time_text
from tandem.operator.decide.observe import Snapshot
from tandem.operator.decide.plan import decision, see
from tandem.operator.decide.scaling import gives_back
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.workload import deployment, rendered
from tandem.operator.reconcile.acceptance import fits, resources_of
from tandem.operator.settings import OperatorSettings

FULL = 'pods "x" is forbidden: exceeded quota: gpus, requested: {0}, used: {1}, limited: {2}'
EVEN = FULL.format("requests.cpu=2", "requests.cpu=4", "requests.cpu=4")


def pod(*containers: Manifest, init: Manifest | None = None, **fields: Any) -> Manifest:
    """A pod's spec, of what its containers ask for."""
    inits = [] if init is None else [{"resources": init, **fields}]
    return {"containers": [{"resources": each} for each in containers], "initContainers": inits}


@pytest.mark.parametrize(
    ("now", "fit"),
    [
        (pod({"requests": {"cpu": "2000m"}}), True),
        (pod({"requests": {"cpu": 1, "memory": "1024Mi"}}), True),
        (pod({"requests": {"cpu": "1"}}, {"requests": {"cpu": "1100m"}}), False),
        (pod({"requests": {"memory": "2Gi"}}), False),
        (pod({"limits": {"nvidia.com/gpu": 1}}), False),
        (pod({}, init={"requests": {"cpu": "2"}}), True),
        (pod({}, init={"requests": {"cpu": "3"}}), False),
        (pod({"requests": {"cpu": 1}}, init={"requests": {"cpu": 2}}, restartPolicy="Always"),
         False),
    ],
)  # fmt: skip
def test_a_pod_fits_where_it_asks_for_no_more(now: Manifest, fit: bool):
    assert fits(now, pod({"requests": {"cpu": "2", "memory": "1Gi"}})) is fit


def test_a_limit_alone_is_a_request_too():
    gpu = {"limits": {"nvidia.com/gpu": "1"}}
    assert resources_of(pod(gpu)) == {"limits.nvidia.com/gpu": 1, "requests.nvidia.com/gpu": 1}


TWO = {"prefill__replicas": 2, "decode__replicas": 2}


def in_place(said: str, *, since: float) -> bool:
    """Whether the rollout goes on in place when the pilot's pods were refused so at ``since``."""
    old, new = (
        Facts(owner=OWNER, spec=typed(**changes), settings=OperatorSettings())
        for changes in (TWO, {**TWO, "engine__maxNumSeqs": 3})
    )
    revisions = {role: (old.revision(role), new.revision(role)) for role in Role}
    memory = RolloutStatus(
        targets={role: after for role, (_, after) in revisions.items()},
        stable={role: before for role, (before, _) in revisions.items()},
        progressed_at=time_text(NOW),
    )
    pilot = deployment(new, Role.DECODE, revisions[Role.DECODE][1], 1, rendered(new, Role.DECODE))
    failure = {"type": "ReplicaFailure", "status": "True", "message": said}
    pilot["status"] = {"conditions": [{**failure, "lastTransitionTime": time_text(since)}]}
    live = Snapshot({"Deployment": {pilot["metadata"]["name"]: pilot}})
    seen = see(OWNER, 2, new.spec, LLMServiceStatus(rollout=memory), live)
    decided = decision(seen, new, may_move=True, servable=frozenset(), now=NOW)
    return decided.memory.in_place


def test_a_pilot_for_which_a_quota_has_no_room_turns_the_rollout_in_place():
    """As one that finds no node does, and as late; another refusal does not pass by giving room."""
    assert in_place(EVEN, since=NOW - 61)
    assert not in_place(EVEN, since=NOW - 5)
    assert not in_place("denied by a webhook", since=NOW - 61)


def test_a_quota_that_was_lowered_below_its_use_turns_no_rollout_in_place():
    """A pod that goes makes no room in it."""
    assert not in_place(FULL.format("pods=1", "pods=5", "pods=4"), since=NOW - 61)


@pytest.mark.parametrize(
    ("used", "limited", "room"),
    [
        ("pods=4", "pods=4", True),
        ("pods=5", "pods=4", False),
        ("pods=4,requests.memory=2Gi", "pods=4,requests.memory=2048Mi", True),
        ("pods=4,requests.memory=2Gi", "pods=4,requests.memory=2G", False),
        ("requests.cpu=1500m", "requests.cpu=2", True),
        ("requests.cpu=1500m", "requests.cpu=1", False),
        ("pods=4", "requests.cpu=4", False),
        ("pods=many", "pods=4", False),
        ("pods", "pods", False),
    ],
)
def test_a_quota_gives_back_what_it_does_not_lack(used: str, limited: str, room: bool):
    """Where nothing that it names is used beyond its limit, and only where that can be read."""
    assert gives_back(FULL.format("pods=1", used, limited)) is room
