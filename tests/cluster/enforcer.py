"""Enforces NetworkPolicies in the test cluster, which has no network plugin that would.

A process beside the cluster, started by ``up`` and ended by ``down``: it reads the objects every
second and loads a node's table whenever its text changes. `python -m tests.cluster.enforcer` is
that process. What it does with the objects is in policies.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import sys
import time
from typing import Any

from tests.cluster import layout, machines, policies, processes
from tests.cluster.machines import Machines
from tests.cluster.processes import ClusterError

EVERY_SECONDS = 1.0
TIMEOUT_SECONDS = 10.0
PATHS = {
    "pods": "/api/v1/pods",
    "namespaces": "/api/v1/namespaces",
    "policies": "/apis/networking.k8s.io/v1/networkpolicies",
}


def spawn() -> None:
    """Start the process; ``down`` finds it by its mark."""
    processes.spawn(
        *(sys.executable, "-m", "tests.cluster.enforcer"),
        log=layout.LOG / "enforcer.log",
        env={**machines.environment(), "PYTHONPATH": str(layout.REPOSITORY)},
    )


class Api:
    """The API server over one connection that is kept, as the administrator."""

    def __init__(self) -> None:
        self._tls = ssl.create_default_context(cafile=str(layout.PKI / "ca.crt"))
        self._tls.load_cert_chain(layout.PKI / "admin.crt", layout.PKI / "admin.key")
        self._connection: http.client.HTTPSConnection | None = None

    def items(self, path: str) -> tuple[dict[str, Any], ...]:
        """The items of a list, from the API server's own cache."""
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(
                layout.API_ADDRESS, layout.API_PORT, timeout=TIMEOUT_SECONDS, context=self._tls
            )
        try:
            self._connection.request("GET", f"{path}?resourceVersion=0")
            answer = self._connection.getresponse()
            content = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            self._connection.close()
            self._connection = None
            raise
        if answer.status != 200:
            raise ClusterError(f"{path}: {answer.status} {content.get('message', '')}")
        return tuple(content["items"])


def enforce(api: Api, loaded: dict[tuple[str, int], str]) -> None:
    """One look: load what changed. ``loaded`` is kept from look to look."""
    view = policies.View(**{name: api.items(path) for name, path in PATHS.items()})
    fleet = Machines.load()
    for node in fleet.nodes:
        text, key = policies.table(node, view), (node, fleet.holders[node])
        if loaded.get(key) == text:
            continue
        fleet.inside(node, "nft", "-f", "-", stdin=text)
        loaded[key] = text
        say(f"{node}: {text.count('jump')} directions of pods isolated")


def say(text: str) -> None:
    print(time.strftime("%X"), text, flush=True)


def main() -> None:
    """Look and enforce until killed; a failure is told, and the next look is a second later."""
    api, loaded = Api(), dict[tuple[str, int], str]()
    while True:
        try:
            enforce(api, loaded)
        except (ClusterError, OSError, http.client.HTTPException, ValueError) as error:
            with contextlib.suppress(BrokenPipeError):
                say(f"{type(error).__name__}: {error}")
        time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    main()
