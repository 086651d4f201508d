"""Children that are deleted or edited come back; operators die, and events are swallowed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest
from tests.e2e_cluster import pods
from tests.e2e_cluster.faults import kill_container
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import Json, KubeError, wait_for
from tests.e2e_cluster.service import Service
from tests.e2e_cluster.setup import Setup

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

REPAIR_SECONDS = 5.0
LEASE_SECONDS, RETRY_SECONDS, BUSY_SECONDS = 15.0, 2.0, 10.0
"""Of the election, by default; and for its calls, which a busy machine is slow to answer."""
TAKEOVER_SECONDS = LEASE_SECONDS + 2 * RETRY_SECONDS + BUSY_SECONDS
"""From a leader's last word to the next one's first, by the Lease: the other hears that word up to
a period late, and looks up to a period after it has lapsed."""
SEEN_SECONDS = 60.0
KINDS = (
    "services,configmaps,serviceaccounts,deployments.apps,controllerrevisions.apps,"
    "networkpolicies.networking.k8s.io,poddisruptionbudgets.policy,"
    "roles.rbac.authorization.k8s.io,rolebindings.rbac.authorization.k8s.io"
)
"""Secrets are not here: the loss of a key is a rotation, which rolls pods."""


def children(service: Service) -> list[Json]:
    """What the operator made for the service, as `kubectl get` lists it."""
    owner = service.get()["metadata"]["uid"]
    return [
        each
        for each in service.kube.items(KINDS, service.selector)
        if any(ref["uid"] == owner for ref in each["metadata"].get("ownerReferences", []))
    ]


def address(child: Json) -> tuple[str, str]:
    """Kind and name, as kubectl wants them."""
    group = child["apiVersion"].partition("/")[0] if "/" in child["apiVersion"] else ""
    kind = child["kind"].lower()
    return f"{kind}.{group}" if group else kind, pods.name_of(child)


def returns(service: Service, child: Json) -> Callable[[], bool]:
    kind, name = address(child)

    def check() -> bool:
        found = service.kube.find(kind, name)
        return found is not None and found["metadata"]["uid"] != child["metadata"]["uid"]

    return check


def test_every_deleted_child_comes_back(service: Service) -> None:
    """One at a time, each is there again within 5 s, and the service answers afterwards."""
    listed = children(service)
    assert {child["kind"] for child in listed} >= {
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Role",
        "Service",
    }
    late = []
    for child in listed:
        kind, name = address(child)
        service.kube.delete(kind, name, "--wait=false")
        try:
            wait_for(f"{kind} {name}", returns(service, child), seconds=REPAIR_SECONDS)
        except AssertionError as error:
            late.append(str(error))
    assert not late, late
    service.wait_ready()
    assert "Paris" in service.ask()


EDITS: dict[str, Json] = {
    "deployment.apps": {"spec": {"replicas": 0}},
    "service": {"spec": {"selector": {"tandem.dev/stranger": "yes"}}},
    "networkpolicy.networking.k8s.io": {"spec": {"ingress": [{}]}},
    "role.rbac.authorization.k8s.io": {
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]
    },
}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_child_is_put_right(service: Service, kind: str) -> None:
    """What a hand changed is the operator's again within 5 s."""
    child = next(each for each in children(service) if address(each)[0] == kind)
    name = pods.name_of(child)
    before = service.kube.get(kind, name)

    def as_before(now: Json) -> bool:
        return all(now.get(field) == before.get(field) for field in ("spec", "rules"))

    assert not as_before(service.kube.patch(kind, name, EDITS[kind])), "the edit took hold"
    wait_for(
        f"{kind} {name} to be put right",
        lambda: as_before(service.kube.get(kind, name)),
        seconds=REPAIR_SECONDS,
    )
    service.wait_ready()


@pytest.mark.nightly
def test_a_lost_key_is_a_rotation(service: Service) -> None:
    """A deleted key Secret is made anew with other keys, and the service serves on with them."""
    secrets = service.kube.items("secrets", service.selector)
    keys = next(each for each in secrets if "decode-keys" in pods.name_of(each))
    before = service.get()["status"]["keys"]["generation"]
    service.kube.delete("secret", pods.name_of(keys))

    def rotated() -> bool:
        found = service.get()["status"].get("keys", {})
        return found.get("generation", 0) > before and not found.get("rotating", False)

    wait_for("the rotation", rotated, seconds=240)
    service.wait_stable()
    assert "Paris" in service.ask()


def test_the_other_operator_goes_on(service: Service, operator: Installed, setup: Setup) -> None:
    """The leader is killed with -9 in a rollout: another leads in its time, nothing is doubled."""
    leader, incarnation = operator.holder(), operator.identity()
    assert leader, "nobody leads"
    words = [operator.lease()["renewTime"]]
    service.patch(engine={"maxNumSeqs": 8})
    service.wait_condition("Progressing", "True", "RollingOut", 30)
    kill_container(operator.kube, setup, operator.kube.get("pod", leader), "operator")

    def taken_over() -> str | None:
        lease = operator.lease()
        holder = lease.get("holderIdentity") or ""
        if holder == incarnation:
            words.append(lease["renewTime"])
        return lease["acquireTime"] if holder not in ("", incarnation) else None

    words.append(wait_for("another leader", taken_over, seconds=SEEN_SECONDS))
    last, first = map(datetime.fromisoformat, words[-2:])
    assert (first - last).total_seconds() < TAKEOVER_SECONDS, words
    service.wait_stable(240)
    for role in ("prefill", "decode", "router"):
        service.wait_pods(role, 1)
    names = [address(child) for child in children(service)]
    assert len(names) == len(set(names))
    assert "Paris" in service.ask()


def test_swallowed_events_are_made_up_for(service: Service, operator: Installed) -> None:
    """Events of a child do not come while no operator watches; its loss is repaired all the same.

    The proxy that swallows events stands in tests/operator; here every operator is away while the
    change happens, which no watch will tell the next one either.
    """
    deployment = "deployment", "tandem"
    operator.kube.run("scale", *deployment, "--replicas=0")
    wait_for("operators to go", lambda: not operator.pods(), seconds=60)
    child = next(each for each in children(service) if each["kind"] == "NetworkPolicy")
    kind, name = address(child)
    service.kube.delete(kind, name)
    operator.kube.run("scale", *deployment, "--replicas=2")
    wait_for(f"{kind} {name}", returns(service, child), seconds=70)


def test_operators_do_not_end_by_themselves(operator: Installed, restarts_before: int) -> None:
    """After all of the above nobody but the killed leader has been started again."""
    try:
        logs = operator.kube.run("logs", "deployment/tandem", "--tail=40")
    except KubeError as error:
        logs = str(error)
    assert operator.restarts() <= restarts_before + 1, logs  # the one that was killed above
