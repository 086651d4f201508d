"""Two services that come up in a namespace whose quota has room for one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.in_memory import Demo, Item

from tandem.operator.decide.observe import WorkloadView
from tandem.operator.desired.naming import Role
from tandem.operator.reconcile.reconciler import Neighbour, goes_first

FULL = 'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4'
OTHER = 'pods "x" is forbidden: violates PodSecurity'


def service(name: str, *existing: int, refused: str | None = FULL, **more: Any) -> Neighbour:
    """One that asks for one pod of each role, of which so many are there."""
    views = {
        (role, "a"): WorkloadView(
            name=f"{name}-{role}",
            asked=1,
            existing=number,
            refused=None if number else refused,
        )
        for role, number in zip(Role, existing, strict=True)
    }
    given = {"created": "1", "has_served": False, "has_failed": False, **more}
    return Neighbour(name=name, workloads=views, **given)


@pytest.mark.parametrize(
    ("mine", "other", "first"),
    [
        (service("b", 1, 0, 1), service("a", 0, 1, 1), "a"),
        (service("a", 0, 1, 1), service("b", 1, 0, 1), None),
        (service("b", 1, 1, 1), service("a", 0, 1, 1), None),
        (service("b", 1, 0, 1), service("a", 1, 1, 1), None),
        (service("b", 1, 0, 1), service("a", 0, 1, 1, refused=OTHER), None),
        (service("b", 1, 0, 1), service("a", 0, 1, 1, has_served=True), None),
        (service("b", 1, 0, 1, has_served=True), service("a", 0, 1, 1), None),
        (service("a", 1, 0, 1, created="2"), service("b", 0, 1, 1), "b"),
        (service("b", 1, 0, 1), service("a", 0, 1, 1, has_failed=True), None),
        (service("a", 1, 0, 1, has_failed=True), service("b", 0, 1, 1), "b"),
    ],
    ids=[
        "the older lacks room",
        "the younger waits",
        "mine is whole",
        "the older is whole",
        "another refusal",
        "a rollout of one that serves",
        "mine serves",
        "by age before name",
        "one that never fits",
        "mine never fits",
    ],
)
def test_the_older_one_goes_first(mine: Neighbour, other: Neighbour, first: str | None):
    """A service that is not whole gives way to an older one that lacks room."""
    assert goes_first(mine, [other]) == first


def test_a_service_gives_its_pods_back_and_takes_them_when_the_other_serves():
    """The older one lacks room, so this one has no pods until that serves."""
    demo = Demo()
    older: Item = {
        "apiVersion": "tandem.dev/v1alpha1",
        "metadata": {"name": "aaa", "uid": "older"},
        "spec": {},
        "status": {},
    }
    demo.cluster.put("LLMService", older)
    labels = {
        "tandem.dev/service": "aaa",
        "tandem.dev/role": "decode",
        "tandem.dev/revision": "a",
    }
    full = {"type": "ReplicaFailure", "status": "True", "message": FULL}
    deployment: Item = {
        "metadata": {"name": "aaa-decode-a", "labels": labels},
        "spec": {"replicas": 1, "template": {"metadata": {"labels": labels}, "spec": {}}},
        "status": {"conditions": [{**full, "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
    }
    demo.cluster.put("Deployment", deployment)
    demo.turn(3, is_ready=lambda _pod: False)
    demo.cluster.put("Deployment", deployment)  # the stand-in for controllers gave it its pod
    mine = [
        each for each in demo.cluster.of("Deployment") if each["metadata"]["name"][:4] == "demo"
    ]
    for each in mine:
        each["status"] = {**each["status"], "replicas": 0}
        demo.cluster.put("Deployment", each)
    demo.look()
    assert sum(sum(demo.replicas(role).values()) for role in ("prefill", "router")) == 0
    assert demo.condition("Accepted")[:2] == ("Unknown", "QuotaExceeded")
    assert "aaa" in demo.condition("Accepted")[2]
    demo.cluster.put("LLMService", {**older, "status": {"rollout": {"stable": {"decode": "a"}}}})
    demo.look()
    assert sum(demo.replicas("prefill").values()) == 1
    demo.close()
