"""A router whose node fell silent leaves the Service, on a real API server."""

from __future__ import annotations

import selectors
import socket
import threading
import time

import pytest
from tests.operator.harness import Harness
from tests.operator.node import Node
from tests.operator.silent import SILENT_ADDRESS, Silent, routers_apart, says_silent

from tandem.operator.probes import reach
from tandem.operator.probes.reach import REASON
from tandem.protocol.names import ROUTER_PORT

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]
TAKEN_SECONDS = 60.0


def warnings(harness: Harness) -> list[str]:
    events = harness.cluster.items("Event", harness.namespace)
    return [each["message"] for each in events if each["reason"] == REASON]


@pytest.mark.nightly
def test_a_router_of_a_silent_node_is_not_ready(harness: Harness, node: Node, silent: Silent):
    """It is told with address and node; the pod stays, and the other router, too."""
    harness.create()
    harness.ready()
    with routers_apart(harness, node) as routers:
        routers.kubelet_lives = False
        uids = {pod["metadata"]["uid"] for pod in routers.pods()}
        harness.wait(lambda: routers.is_taken_out(), TAKEN_SECONDS, "taken out")
        assert "127.11." in routers.ready("b")["message"]
        assert routers.ready("a")["status"] == "True"
        assert {pod["metadata"]["uid"] for pod in routers.pods()} == uids
        harness.wait(lambda: warnings(harness), text="told")
        assert f"router {routers.names['b']}: 127.11." in warnings(harness)[0]
        assert "on node b has not answered for 4 s" in warnings(harness)[0]
        harness.wait(lambda: harness.condition("RouterReady")[2].startswith("1 of 2"))


def test_a_kubelet_that_objects_is_believed(harness: Harness, node: Node, silent: Silent):
    """An operator that alone cannot reach a router takes it out once: its kubelet knows better."""
    harness.create()
    harness.ready()
    selector = "tandem.dev/service=demo,tandem.dev/role=router"
    with harness.watch("pod", selector) as seen, routers_apart(harness, node) as routers:

        def times() -> int:
            return sum(says_silent(pod) for _, pod in seen())

        harness.wait(lambda: times() > 0, TAKEN_SECONDS, "taken out")
        harness.wait(lambda: routers.ready("b")["status"] == "True", text="ready by its kubelet")
        harness.wait(lambda: warnings(harness), text="told")
        assert times() == 1
        assert len(warnings(harness)) == 1


def test_connections_and_refusals_are_answers_and_silence_is_none(silent: Silent):
    with socket.create_server(("127.12.0.1", ROUTER_PORT)):
        asked = {"taken": "127.12.0.1", "refused": "127.12.0.2", "silent": SILENT_ADDRESS}
        assert reach.answering(asked, ROUTER_PORT, 0.2) == {"taken", "refused"}
    assert reach.answering({}, ROUTER_PORT, 0.2) == frozenset()


def test_an_answer_that_was_slept_over_is_one(silent: Silent, monkeypatch: pytest.MonkeyPatch):
    """A judge that stood still for longer than it waits looks once more: answers that lie there
    came in time."""
    real, own = selectors.DefaultSelector.select, threading.get_ident()
    looks: list[float | None] = []

    def sleepy(self: selectors.DefaultSelector, timeout: float | None = None) -> object:
        if threading.get_ident() != own:  # a loop that another test has left
            return real(self, timeout)
        looks.append(timeout)
        if len(looks) > 1:
            return real(self, timeout)
        silent.wake()  # the kernel tries again after a second, and is refused
        time.sleep(2.0)
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", sleepy)
    assert reach.answering({"late": SILENT_ADDRESS}, ROUTER_PORT, 0.1) == {"late"}
    assert looks[1:] == [0.0]
