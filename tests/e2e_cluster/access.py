"""How the suite reaches routers: by a node port, from whichever machine it runs on.

A Service of the suite's own selects the routers of one LLMService, so that the service under test
stays as its sample has it. Pods and cluster addresses need not be reachable from here; a node's
address is, on the cluster of tests/cluster, on kind under Linux, and on most real ones.
"""

from __future__ import annotations

import httpx
from tests.e2e_cluster.kube import Json, Kube, wait_for
from tests.e2e_cluster.setup import Setup

PORT = 8000
OPEN_SECONDS = 30.0


def open_port(kube: Kube, setup: Setup, name: str, selector: dict[str, str]) -> str:
    """Base URL under which the pods of a selector answer, once it does. May be called again."""
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": kube.namespace},
            "spec": {"type": "NodePort", "selector": selector, "ports": [{"port": PORT}]},
        }
    )
    number = kube.get("service", name)["spec"]["ports"][0]["nodePort"]
    url = f"http://{setup.address or node_address(kube)}:{number}"
    wait_for(f"{url} to answer", lambda: _answers(url), seconds=OPEN_SECONDS)
    return url


def _answers(url: str) -> bool:
    """Whether the port is open: nodes learn of a new one after a second or so."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def node_address(kube: Kube) -> str:
    """Address of the first node; tests that end a node end a later one."""
    first = min(kube.items("nodes"), key=lambda node: str(node["metadata"]["name"]))
    return internal_address(first)


def internal_address(node: Json) -> str:
    addresses: list[dict[str, str]] = node["status"]["addresses"]
    return next(each["address"] for each in addresses if each["type"] == "InternalIP")
