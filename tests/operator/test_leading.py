"""Two replicas, a leader that is killed, watches that go silent: on a real API server."""

from __future__ import annotations

import time

import pytest
from tests.operator.control_plane import ControlPlane
from tests.operator.harness import FAST, Harness, Operators
from tests.operator.node import Node
from tests.operator.prepared import make_namespace
from tests.operator.proxy import Proxy
from tests.operator.silent import Silent, routers_apart

TAKEOVER_SECONDS = 20.0
pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(120)]


def holder(harness: Harness) -> str:
    lease = harness.cluster.get("Lease", harness.namespace, "tandem-operator")
    return "" if lease is None else lease["spec"].get("holderIdentity") or ""


@pytest.mark.nightly
def test_the_other_replica_goes_on_in_the_middle_of_a_rollout(lone: Harness, operators: Operators):
    """The leader is killed with -9 while rolling; the standby finishes it, nothing is doubled."""
    first = operators.start("first", None, **FAST)
    lone.wait_for(lambda: "-first_" in holder(lone))
    operators.start("second")
    lone.create(prefill__replicas=2, decode__replicas=2)
    lone.ready()
    lone.change({"spec": {"engine": {"maxNumSeqs": 5}}})
    lone.wait(lambda: lone.condition("Progressing")[1] == "RollingOut")
    first.kill()
    took = lone.wait_for(lambda: "-second_" in holder(lone), TAKEOVER_SECONDS)
    assert took < TAKEOVER_SECONDS
    lone.wait(lambda: lone.condition("Progressing")[1] == "Stable", 60)
    lone.wait(lambda: len(lone.replicas()) == 3)
    assert sorted(lone.replicas().values()) == [2, 2, 2]
    assert {name.rpartition("-")[2] for name in lone.key_pairs()} == {"g1"}


def test_a_leader_that_ends_hands_over_at_once(lone: Harness, operators: Operators):
    """SIGTERM gives the Lease back: the standby leads within a few seconds."""
    first = operators.start("first")
    lone.wait_for(lambda: "-first_" in holder(lone))
    second = operators.start("second")
    lone.wait_for(second.listens)
    time.sleep(2)
    assert "kopf" not in second.log()
    started = time.monotonic()
    assert first.stop() == 0
    lone.wait_for(lambda: "-second_" in holder(lone))
    assert time.monotonic() - started < 20, "the Lease lapsed"


def test_a_new_leader_takes_a_dead_router_out_without_memory(
    lone: Harness, operators: Operators, node: Node, silent: Silent
):
    """The leader dies with the router's node: the next one never heard of that router, and does
    what its setting says."""
    first = operators.start("first", None, **FAST, router_silence_seconds=0)
    lone.create()
    lone.ready()
    with routers_apart(lone, node) as routers:
        routers.kubelet_lives = False
        first.kill()
        operators.start("second", router_silence_seconds=1)
        lone.wait(routers.is_taken_out, 40, "taken out")
        assert "has not answered for 1 s" in routers.ready("b")["message"]


def test_a_leader_that_cannot_renew_ends(lone: Harness, operators: Operators, plane: ControlPlane):
    """A leader cut off from the API server is gone before its Lease is free."""
    with Proxy(plane) as proxy:
        cut = operators.start("cut", proxy.kubeconfig(), **FAST)
        lone.wait_for(lambda: "-cut_" in holder(lone))
        proxy.cut()
        assert cut.process.wait(timeout=10) == 3


def test_a_leader_whose_calls_hang_is_gone_before_another_leads(
    lone: Harness, operators: Operators, plane: ControlPlane
):
    """An API server that begins answers and never ends them costs the leader its life in time: at
    no moment two replicas may act."""
    with Proxy(plane) as proxy:
        hung = operators.start("hung", proxy.kubeconfig(), **FAST)
        lone.wait_for(lambda: "-hung_" in holder(lone))
        operators.start("next")
        lone.create()
        lone.ready()
        proxy.hang()
        lone.wait_for(lambda: hung.process.poll() is not None or "-next_" in holder(lone))
        assert hung.process.poll() == 3, "the old leader still lives while another leads"
        lone.wait_for(lambda: "-next_" in holder(lone), TAKEOVER_SECONDS)
        assert "could not be renewed" in hung.log()


def test_an_api_server_that_stands_still_leaves_one_leader(
    lone: Harness, operators: Operators, plane: ControlPlane
):
    """Nobody's calls come back: the leader is gone although none could lead in its place. Once the
    server goes on, and does what hung in it as well, the standby leads."""
    hung = operators.start("hung", None, **FAST)
    lone.wait_for(lambda: "-hung_" in holder(lone))
    standby = operators.start("next")
    with plane.hung():
        assert hung.process.wait(timeout=30) == 3
    lone.wait_for(lambda: "-next_" in holder(lone))
    assert "could not be renewed" in hung.log()
    assert standby.process.poll() is None


def test_state_is_right_again_although_watches_are_silent(
    lone: Harness, operators: Operators, plane: ControlPlane
):
    """With every watch event swallowed, the periodic list repairs and brings up services."""
    with Proxy(plane, swallow=True) as proxy:
        operators.start("deaf", proxy.kubeconfig(), resync_seconds=3)
        lone.wait_for(lambda: "-deaf_" in holder(lone))
        lone.create()
        lone.ready()
        lone.cluster.delete("Service", lone.namespace, "demo")
        lone.wait(lambda: "demo" in lone.names("Service"))
        assert proxy.swallowed > 0


@pytest.mark.nightly
def test_a_rotation_ends_with_new_keys_alone(lone: Harness, operators: Operators):
    """All pods get the new generation, then the old Secrets and public keys are gone."""
    operators.start("rotating", key_publish_seconds=2)
    lone.wait_for(lambda: "-rotating_" in holder(lone))
    lone.create()
    lone.ready()
    lone.change({"spec": {"security": {"keyRotationID": "a"}}})
    wanted = {f"demo-{role}-g2" for role in ("prefill", "decode", "router")}
    lone.wait(lambda: lone.key_pairs() == wanted, 45, "only g2")
    lone.wait(lambda: lone.condition("Progressing")[1] == "Stable")
    peers = lone.cluster.get("ConfigMap", lone.namespace, "demo-peers")
    assert peers is not None
    assert {name.split(".")[1] for name in peers["data"]} == {"2"}
    lone.wait(lambda: lone.service()["status"]["keys"].get("rotating") is None)


@pytest.mark.nightly
def test_a_namespace_without_rights_holds_up_no_other(
    lone: Harness, operators: Operators, plane: ControlPlane
):
    """Of two watched namespaces one was deleted, and its Role with it: the other is served. The
    one that is there again is served from then on."""
    gone = f"{lone.namespace}-gone"
    account = f"--serviceaccount={lone.namespace}:op"
    lone.kubectl("create", "serviceaccount", "op")
    lone.kubectl("apply", "-f", "manifests/operator/rbac.yaml")
    lone.kubectl("create", "rolebinding", "leads", "--role=tandem-operator-lease", account)
    lone.kubectl("create", "rolebinding", "serves", "--clusterrole=tandem-operator", account)
    config = plane.kubeconfig(token=lone.kubectl("create", "token", "op").strip())
    process = operators.start("of-two", config, "--namespaces", gone, resync_seconds=3)
    lone.create()
    lone.ready()
    assert f"namespace {gone} is left out" in process.log()
    make_namespace(plane, gone)
    again = Harness(plane, lone.cluster, gone)
    again.create()
    again.kubectl("create", "rolebinding", "serves", "--clusterrole=tandem-operator", account)
    again.ready()
    assert process.process.poll() is None
