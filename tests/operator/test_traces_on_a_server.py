"""What the operator's traces say of services on a real API server, against what it was asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from otlp_receiver import Receiver
from tests.operator.control_plane import ControlPlane
from tests.operator.harness import Harness, OperatorProcess
from tests.operator.node import Node
from tests.operator.proxy import Proxy
from tests.operator.silent import Silent, routers_apart

PHASES = ("observe", "plan", "apply", "accept", "ask", "tell")
REASONS = "tandem.reconcile.reasons"
LEASES = "/leases"
SECONDS = 30.0
SENT_EVERY = "100"
"""Milliseconds after which the operator sends its spans."""

pytestmark = [pytest.mark.full, pytest.mark.slow]


class Traced:
    """An operator of a namespace whose spans come here, and what it asked the API server."""

    def __init__(self, harness: Harness, receiver: Receiver, proxy: Proxy, resync: int) -> None:
        self._harness = harness
        self._receiver = receiver
        self._proxy = proxy
        flags = [f"--namespaces={harness.namespace}"]
        flags += [f"--otlp-traces-endpoint={receiver.grpc_url}"]
        plane, name = harness.plane, f"{harness.namespace}-traced"
        harness.kubectl("apply", "-f", "manifests/operator/lease.yaml")
        where = (plane.home, name, proxy.kubeconfig())
        self.process = OperatorProcess(
            *where, *flags, namespace=harness.namespace, resync_seconds=resync
        )
        harness.wait_for(self._watches, SECONDS)

    def _watches(self) -> bool:
        return any(
            each.startswith("WATCH") and each.endswith("/llmservices")
            for each in self._proxy.requests
        )

    def named(self, name: str) -> list[dict[str, Any]]:
        return self._receiver.named(name)

    def rounds(self) -> int:
        """How often services were listed; each was looked at about as often."""
        return sum(each.endswith("/llmservices") for each in self._proxy.requests)

    def looks(self, **said: Any) -> list[dict[str, Any]]:
        """Looks with these attributes, of which a trace came."""
        wanted = {f"tandem.reconcile.{name}": value for name, value in said.items()}
        return [
            each for each in self.named("reconcile") if wanted.items() <= each["attributes"].items()
        ]

    def below(self, root: dict[str, Any], parent: str = "") -> list[dict[str, Any]]:
        """Spans of a trace but its root, or those right under one of a name."""
        spans = self._receiver.of(root["trace"])
        names = {each["id"]: each["name"] for each in spans}
        assert [each["id"] for each in spans if each["parent"] not in names] == [root["id"]]
        return [
            each
            for each in spans
            if each is not root and (not parent or names[each["parent"]] == parent)
        ]

    def written(self) -> Counter[str]:
        """Writes by method, as they went by; the Lease is no look's."""
        asked = (each.split() for each in self._proxy.requests if LEASES not in each)
        return Counter(method for method, _ in asked if method not in ("GET", "WATCH"))

    def told(self) -> Counter[str]:
        """Writes by method, as spans tell them."""
        methods = (each["attributes"].get("http.request.method") for each in self._receiver.spans)
        return Counter(str(each) for each in methods if each not in (None, "GET"))


@pytest.fixture
def traced(
    plane: ControlPlane,
    lone: Harness,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Traced]:
    """Ends with the test, if not before; a parameter is how often services are listed."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", SENT_EVERY)
    receiver = Receiver()
    with Proxy(plane) as proxy:
        made = Traced(lone, receiver, proxy, getattr(request, "param", 60))
        yield made
        made.process.stop()
    receiver.close()


def test_the_traces_of_a_service_are_what_the_server_was_asked(traced: Traced, lone: Harness):
    """From the first look to Ready: every write is a span in a whole trace, in the phase that made
    it; looks that write nothing leave no trace, however often they are taken."""
    lone.create()
    lone.ready()
    lone.wait(lambda: lone.condition("KVFabricReady")[1] == "LinksUp")
    assert traced.process.stop() == 0, "and what was left was sent"
    first = min(traced.looks(), key=lambda each: each["begin"])
    assert "service changed" in first["attributes"]["tandem.reconcile.reasons"]
    assert first["attributes"]["tandem.service.namespace"] == lone.namespace
    assert first["attributes"]["tandem.service.name"] == "demo"
    assert first["attributes"]["tandem.service.generation"] == 1
    phases = [each for each in traced.below(first, "reconcile") if each["name"] in PHASES]
    assert {each["name"] for each in phases} == set(PHASES)
    applied = traced.below(first, "apply")
    made = {(each["name"], each["attributes"]["tandem.object.name"]) for each in applied}
    assert {("create Service", "demo"), ("create NetworkPolicy", "demo-decode")} <= made
    assert {"create Secret", "create Job"} <= {name for name, _ in made}
    assert not any(each["error"] for each in applied), "nothing is written twice"
    assert "apply LLMService" in {each["name"] for each in traced.below(first, "tell")}
    assert traced.told() == traced.written()
    reasons = {why for each in traced.looks() for why in each["attributes"][REASONS]}
    assert {"service changed", "child changed", "canary answered"} <= reasons
    assert all(each["attributes"]["tandem.reconcile.num_writes"] for each in traced.looks())


def all_available(lone: Harness) -> bool:
    return all(
        each.get("status", {}).get("availableReplicas", 0) == each["spec"]["replicas"]
        for each in lone.cluster.items("Deployment", lone.namespace)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("traced", [1], indirect=True)
def test_a_quiet_service_leaves_no_traces(traced: Traced, lone: Harness):
    """It is looked at once a second; the next trace is that of the next change, whose generation it
    names."""
    lone.create()
    lone.ready()
    lone.wait(lambda: lone.condition("KVFabricReady")[1] == "LinksUp")
    lone.wait(lambda: lone.condition("Progressing")[1] == "Stable")
    lone.wait(lambda: lone.condition("RouterReady")[0] == "True")
    lone.wait(lambda: all_available(lone))  # the last that is written about its Deployments
    begin = traced.rounds()
    lone.wait(lambda: traced.rounds() > begin + 2, SECONDS)
    before, begin = len(traced.looks()), traced.rounds()
    lone.wait(lambda: traced.rounds() > begin + 5, SECONDS)
    assert len(traced.looks()) == before
    lone.change({"spec": {"suspend": True}})
    lone.wait(lambda: len(traced.looks()) > before, SECONDS)
    assert {
        each["attributes"]["tandem.service.generation"] for each in traced.looks()[before:]
    } == {2}


def forbid_config_maps(lone: Harness) -> None:
    """A quota as its controller would have counted it, which does not run here."""
    lone.kubectl("create", "quota", "none", "--hard=configmaps=0")
    counted = {"status": {"hard": {"configmaps": "0"}, "used": {"configmaps": "0"}}}
    words = ("patch", "quota", "none", "--subresource=status", "--type=merge")
    lone.kubectl(*words, "-p", json.dumps(counted))
    made = ("create", "configmap", "probe", "--dry-run=server")
    lone.wait_for(lambda: "exceeded quota" in lone.kubectl(*made, check=False), SECONDS)


@pytest.mark.nightly
def test_a_look_that_the_server_refuses_has_failed(traced: Traced, lone: Harness):
    """With the API server's words, in the phase and the call that it refused; the next looks say
    that they are taken again."""
    forbid_config_maps(lone)
    lone.create()

    def retried() -> bool:
        return any(
            "retry" in each["attributes"][REASONS] for each in traced.looks(outcome="failed")
        )

    lone.wait(retried, SECONDS)
    first = min(traced.looks(outcome="failed"), key=lambda each: each["begin"])
    assert first["error"]
    assert first["attributes"]["error.type"] == "ClusterError"
    failed = {each["name"] for each in traced.below(first) if each["error"]}
    assert failed == {"apply", "create ConfigMap"}
    lone.kubectl("delete", "quota", "none")
    lone.ready()


def test_a_repair_is_told(traced: Traced, lone: Harness):
    """A child that was deleted is put right beside looks, in a trace of its own."""
    lone.create()
    lone.ready()
    lone.kubectl("delete", "service", "demo")
    lone.wait(lambda: bool(traced.named("repair")), SECONDS)
    repair = traced.named("repair")[0]
    assert "create Service" in {each["name"] for each in traced.below(repair)}


def test_a_router_that_is_taken_out_is_told(
    traced: Traced, lone: Harness, node: Node, silent: Silent
):
    """Its readiness and the event about it are written beside looks, in a trace of their own."""
    lone.create()
    lone.ready()
    with routers_apart(lone, node) as routers:
        routers.kubelet_lives = False
        lone.wait(lambda: bool(traced.named("take out")), SECONDS, "told")
    taken = traced.named("take out")[0]
    assert taken["attributes"][REASONS] == ["router silent or back"]
    assert {each["name"] for each in traced.below(taken)} == {"patch Pod", "create Event"}
