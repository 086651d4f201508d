"""The watch of pods against a real API server: found, changed, gone, and through its absence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.operator.control_plane import ControlPlane, control_plane, missing
from tests.waiting import wait_for

from tandem.protocol.names import LABEL_REVISION, LABEL_ROLE, LABEL_SERVICE, WORKER_PORT
from tandem.router.workers.discovery import Found, PodWatcher

SELECTOR = f"{LABEL_SERVICE}=mine"
SECONDS = 20.0


class Counter:
    count = 0

    def discovery_failed(self) -> None:
        self.count += 1


pytestmark = pytest.mark.full


class Watched:
    """A watcher, and what it last said."""

    def __init__(self, plane: ControlPlane, **settings: Any) -> None:
        from kubernetes import client, config

        configuration = client.Configuration()
        config.load_kube_config(str(plane.kubeconfig()), client_configuration=configuration)
        api = client.CoreV1Api(client.ApiClient(configuration))
        self.found: Found = {}
        self.counter = Counter()
        self.watcher = PodWatcher(
            api,
            namespace="default",
            selector=SELECTOR,
            on_change=self._told,
            counter=self.counter,
            **settings,
        )
        self.watcher.start()

    def _told(self, found: Found) -> None:
        self.found = found

    def until(self, check: Callable[[Found], object]) -> None:
        wait_for(lambda: check(self.found), SECONDS, seen=lambda: self.found)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server without controllers or nodes."""
    absent = missing()
    if absent:
        pytest.skip(f"no API server: {', '.join(absent)} not in TANDEM_KUBE_BIN or PATH")
    with control_plane(tmp_path_factory.mktemp("plane"), controllers=()) as running:
        running.kubectl("create", "serviceaccount", "default", check=False)
        yield running


@pytest.fixture
def watched(plane: ControlPlane) -> Iterator[Watched]:
    """With a new list every two seconds; no pods before and after."""
    made = Watched(plane, relist=2.0)
    yield made
    made.watcher.stop()
    plane.kubectl("delete", "pods", "--all", "--force", "--grace-period=0")


def create(plane: ControlPlane, name: str, ip: str, service: str = "mine") -> None:
    """A pod as a kubelet would report it."""
    labels = {LABEL_SERVICE: service, LABEL_ROLE: "decode", LABEL_REVISION: "r1"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "nodeName": "somewhere",
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "none"}],
        },
    }
    plane.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    status = {"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}}
    patch = json.dumps(status)
    plane.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)


def endpoint(ip: str) -> str:
    return f"{ip}:{WORKER_PORT}"


def test_pods_are_found_changed_and_gone(plane: ControlPlane, watched: Watched) -> None:
    """Only those of the selector; labels, annotations and deletion are seen as they come."""
    create(plane, "a", "10.1.0.1")
    create(plane, "other", "10.1.0.9", service="theirs")
    watched.until(lambda found: list(found) == [endpoint("10.1.0.1")])
    assert watched.found[endpoint("10.1.0.1")].note.pod == "a"

    plane.kubectl("annotate", "pod", "a", "tandem.dev/admitted=true")
    watched.until(lambda found: found[endpoint("10.1.0.1")].note.admitted)
    plane.kubectl("delete", "pod", "a", "--grace-period=60", "--wait=false")
    watched.until(lambda found: found[endpoint("10.1.0.1")].note.leaving)
    left = watched.found[endpoint("10.1.0.1")].leave_ms
    assert left is not None
    assert 50_000 < left <= 60_000
    plane.kubectl("delete", "pod", "a", "--force", "--grace-period=0")
    watched.until(lambda found: found == {})


def test_swallowed_events_are_made_up_for(
    plane: ControlPlane, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a watch that says nothing at all, the next list tells."""
    monkeypatch.setattr(watched.watcher._book, "apply", lambda kind, pod: None)
    create(plane, "b", "10.1.0.2")
    watched.until(lambda found: endpoint("10.1.0.2") in found)


def test_an_api_server_that_is_away_takes_no_worker_away(
    plane: ControlPlane, watched: Watched
) -> None:
    """Known pods stay, the failure is counted, and afterwards it goes on."""
    create(plane, "c", "10.1.0.3")
    watched.until(lambda found: endpoint("10.1.0.3") in found)
    server = next(each for each in plane.processes if "kube-apiserver" in str(each.args))
    os.kill(server.pid, 19)
    try:
        watched.until(lambda _: watched.counter.count)
        assert endpoint("10.1.0.3") in watched.found
    finally:
        os.kill(server.pid, 18)
    create(plane, "d", "10.1.0.4")
    watched.until(lambda found: endpoint("10.1.0.4") in found)
