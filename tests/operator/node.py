"""Stands in for nodes where there are none: gives pods the status that kubelets would.

Pods become Running and Ready unless a rule says otherwise; Jobs' pods end with a report. Router
pods get the address at which ``FakeRouter`` answers. Everything else is the real API server and
the real controllers.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlencode

from urllib3 import Timeout
from urllib3.exceptions import HTTPError

from tandem.operator.clock import time_text
from tandem.operator.cluster import Cluster, ClusterError
from tandem.protocol import names

ROUTER_ADDRESS = f"127.9.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
"""One of this run's own, since two may go on at once."""
WORKER_ADDRESS = ROUTER_ADDRESS.replace("127.9.", "127.10.")
REPORT = {
    "ok": True,
    "fingerprint": "f" * 32,
    "bytes": 269_000_000,
    "architecture": "LlamaForCausalLM",
    "numHeads": 9,
    "numKvHeads": 3,
    "maxModelLen": 8192,
}

WATCH_SECONDS = 3.0
"""Silence after which a watch begins again."""

Pod = dict[str, Any]
Rule = Callable[[Pod], Pod | None]
"""Status of a pod that shall not simply be ready, or None."""


class Node:
    """Watches the pods of all namespaces, and sets their status ten times a second."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._pods: dict[str, Pod] = {}
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.rules: list[Rule] = []
        self.report: Pod = REPORT

    def start(self) -> None:
        self._watcher.start()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._watcher.join(timeout=WATCH_SECONDS + 10)

    def _watch(self) -> None:
        """Keep ``_pods`` up to date: a watch without a version begins with all pods that exist."""
        api = self._cluster._api
        query = {"watch": "true", "labelSelector": names.LABEL_SERVICE}
        headers: dict[str, Any] = {}
        api.update_params_for_auth(headers, [], ["BearerToken"], "/api/v1/pods", "GET", None)
        url = f"{api.configuration.host}/api/v1/pods?{urlencode(query)}"
        while not self._stop.is_set():
            self._pods = {}
            with contextlib.suppress(HTTPError, OSError, ValueError):
                pool = api.rest_client.pool_manager
                answer = pool.request(
                    "GET",
                    url,
                    headers=headers,
                    timeout=Timeout(WATCH_SECONDS),
                    retries=False,
                    preload_content=False,
                )
                try:
                    for line in _lines(answer.stream(None)):
                        self._note(json.loads(line))
                finally:
                    answer.close()
            self._stop.wait(0.2)

    def _note(self, event: dict[str, Any]) -> None:
        pod = event["object"]
        uid = pod["metadata"]["uid"]
        if event["type"] == "DELETED":
            self._pods.pop(uid, None)
        else:
            self._pods[uid] = pod

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            for pod in list(self._pods.values()):
                with contextlib.suppress(ClusterError):
                    self._care(pod)

    def _care(self, pod: Pod) -> None:
        metadata = pod["metadata"]
        ruled = next((status for rule in self.rules if (status := rule(pod)) is not None), None)
        wanted = ruled or self.ready(pod)
        now = pod.get("status", {})
        if says(now, wanted):
            return
        path = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": wanted}
        body = {
            **path,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        }
        self._cluster.apply(body, subresource="status")

    def ready(self, pod: Pod) -> Pod:
        """Status of a pod of which no rule says anything."""
        labels = pod["metadata"]["labels"]
        since = pod["metadata"]["creationTimestamp"]
        if labels.get(names.LABEL_COMPONENT) == "model":
            ended = {"exitCode": 0, "message": json.dumps(self.report)}
            container = container_status("fetch", {"terminated": ended})
            return {"phase": "Succeeded", "containerStatuses": [container]}
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": since}
            for kind in ("PodScheduled", "ContainersReady", "Ready")
        ]
        address = ROUTER_ADDRESS if labels.get(names.LABEL_ROLE) == "router" else WORKER_ADDRESS
        return {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": conditions,
        }


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def says(now: Any, wanted: Any) -> bool:
    """Whether all of ``wanted`` is in ``now``, to which the API server has added its defaults."""
    if isinstance(wanted, dict):
        found = now or {}
        return all(says(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return len(now or ()) == len(wanted) and all(map(says, now or (), wanted))
    return bool(now == wanted)


def container_status(name: str, state: Pod, **more: Any) -> Pod:
    return {
        "name": name,
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": state,
        **more,
    }


def unschedulable(pod: Pod, text: str = "0/2 nodes are available: 2 Insufficient gpu.") -> Pod:
    """Status of a pod that finds no node."""
    return {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": text,
                "lastTransitionTime": pod["metadata"]["creationTimestamp"],
            }
        ],
    }


def waiting(reason: str, text: str) -> Pod:
    """Status of a pod whose container waits."""
    state = {"waiting": {"reason": reason, "message": text}}
    return {"phase": "Pending", "containerStatuses": [container_status("main", state)]}


LINKS = 16
"""Links that the stand-in of a router says are up: as many as any test's service has pairs."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet: who only looks whether somebody is there opens a connection and resets it."""


class FakeRouter:
    """Answers completions and /debug/fleet as a router does; ``wrong`` breaks the KV path."""

    def __init__(self) -> None:
        self.shape: str | None = "disaggregated"
        self.wrong = False
        self.wrong_models: set[str] = set()
        """Models whose KV path alone is broken."""
        self.spared: str | None = None
        """Revision of decode workers whose KV path is right all the same."""
        self.keys: list[str] | None = None
        """Public keys that routers and workers say they have; None says nothing."""
        self.refused: list[str] = []
        """Workers that let no router in."""
        self.asked: list[dict[str, str]] = []
        handler = type("Handler", (_Handler,), {"router": self})
        places = [(ROUTER_ADDRESS, names.ROUTER_PORT), (WORKER_ADDRESS, names.PROBE_PORT)]
        self._servers = [_Server(place, handler) for place in places]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    router: FakeRouter

    def do_GET(self) -> None:
        if self.path == "/debug/fleet" and names.HEADER_CANARY not in self.headers:
            self.send_error(401)  # as a router with API keys
            return
        peers = {f"prefill-{number}": True for number in range(LINKS)}
        fleet = {"workers": [{"peers": peers}], "quarantined": [], "transport": "tcp"}
        keys = {} if self.router.keys is None else {"keys": self.router.keys}
        self._json(fleet | keys | {"refused": self.router.refused}, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = {key.lower(): value for key, value in self.headers.items()}
        told = {"path": self.path, "model": body["model"], "at": time_text(time.time())}
        self.router.asked.append({**asked, **told})
        if self.path != "/v1/completions":
            self._json({"data": self._pooled(body)}, {})
            return
        shape = asked[names.HEADER_SHAPE.lower()]
        spared = asked[names.HEADER_DECODE_REVISION.lower()] == self.router.spared
        wrong = self.router.wrong or body["model"] in self.router.wrong_models
        broken = wrong and shape == "disaggregated" and not spared
        answered = shape if shape == "aggregated" else self.router.shape
        headers = {} if answered is None else {names.HEADER_SHAPE: answered}
        self._json({"choices": [{"text": " 99" if broken else " 25, 26"}]}, headers)

    def _pooled(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A vector, classes or a score for each text; ``wrong`` gives one that is none."""
        if self.path == "/v1/score":
            return [{"score": None if self.router.wrong else 0.5} for _ in body["text_2"]]
        vectors = [[float(len(text)), 1.0] for text in body["input"]]
        if self.router.wrong:
            vectors[-1] = [0.0, 0.0]
        if self.path == "/classify":
            return [{"probs": vector} for vector in vectors[self.router.wrong :]]
        return [{"embedding": vector} for vector in vectors]

    def _json(self, content: object, headers: dict[str, str]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""
