"""Routers on two nodes of which one falls silent: an address that takes no connection.

A listening socket whose backlog is full: the kernel then answers no further attempt to connect, as
nobody does where a node has lost its power, and all of it stays on the loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.operator.harness import Harness
from tests.operator.node import ROUTER_ADDRESS, Node, Pod

from tandem.operator.probes.reach import REASON
from tandem.protocol.names import LABEL_ROLE, LABEL_SERVICE, ROUTER_PORT

SILENT_ADDRESS = f"127.11.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
_FILLED_SECONDS = 0.3
_MOST = 16


class Silent:
    """``SILENT_ADDRESS`` while nobody answers there."""

    def __init__(self) -> None:
        place = (SILENT_ADDRESS, ROUTER_PORT)
        self._listener = socket.create_server(place, backlog=0)
        self._waiting: list[socket.socket] = []
        for _ in range(_MOST):
            made = socket.socket()
            self._waiting.append(made)
            made.settimeout(_FILLED_SECONDS)
            try:
                made.connect(place)
            except TimeoutError:
                return
        raise AssertionError("the backlog does not fill")

    def wake(self) -> None:
        """Answer: a refusal is an answer, too."""
        for each in (*self._waiting, self._listener):
            each.close()


def ready_of(pod: Pod) -> Pod:
    found: list[Pod] = pod.get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == "Ready"), {"status": "Unknown"})


def says_silent(pod: Pod) -> bool:
    """Whether a pod is not ready by the operator's word."""
    ready = ready_of(pod)
    return (ready["status"], ready.get("reason")) == ("False", REASON)


class Routers:
    """The router pods of the demo, on nodes a and b; b's kubelet can be dead."""

    def __init__(self, harness: Harness, node: Node) -> None:
        self._harness = harness
        first, second = sorted(pod["metadata"]["name"] for pod in self.pods())
        self.names = {"a": first, "b": second}
        self.kubelet_lives = True
        node.rules.append(self._rule)
        for where, name in self.names.items():
            self._bind(name, where)
        harness.wait(lambda: self.pod("b")["status"].get("podIP") == SILENT_ADDRESS)

    def pods(self) -> list[Pod]:
        chosen = f"{LABEL_SERVICE}=demo,{LABEL_ROLE}=router"
        return self._harness.cluster.items("Pod", self._harness.namespace, chosen)

    def pod(self, node: str) -> Pod:
        found = self._harness.cluster.get("Pod", self._harness.namespace, self.names[node])
        assert found is not None
        return found

    def ready(self, node: str) -> Pod:
        return ready_of(self.pod(node))

    def is_taken_out(self) -> bool:
        """Whether the operator has said of b's router that it is not ready."""
        return says_silent(self.pod("b"))

    def _rule(self, pod: Pod) -> Pod | None:
        if pod["metadata"]["name"] != self.names["b"]:
            return None
        if not self.kubelet_lives:
            return {"phase": "Running"}  # nothing of it is written any more
        conditions = [
            {
                "type": kind,
                "status": "True",
                "lastTransitionTime": pod["metadata"]["creationTimestamp"],
            }
            for kind in ("PodScheduled", "ContainersReady", "Ready")
        ]
        address = {"podIP": SILENT_ADDRESS, "podIPs": [{"ip": SILENT_ADDRESS}]}
        return {"phase": "Running", **address, "conditions": conditions}

    def _bind(self, name: str, node: str) -> None:
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        path = f"/api/v1/namespaces/{self._harness.namespace}/pods/{name}/binding"
        self._harness.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))

    def remove(self) -> None:
        words = ("--grace-period=0", "--force", "--wait=false")
        self._harness.kubectl("delete", "pod", *self.names.values(), *words, check=False)


@contextmanager
def routers_apart(harness: Harness, node: Node) -> Iterator[Routers]:
    """A ready demo's routers on two nodes: a's answers, b's lies at the silent address."""
    routers = Routers(harness, node)
    assert routers.pod("a")["status"]["podIP"] == ROUTER_ADDRESS
    try:
        yield routers
    finally:
        with contextlib.suppress(ValueError):
            node.rules.remove(routers._rule)
        routers.remove()
