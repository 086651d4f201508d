"""How processes in pods reach the API server: by address, since the cluster's DNS may be away."""

from __future__ import annotations

import gc
import ipaddress
import socket
import threading
import time
from pathlib import Path
from typing import Any

import kopf
import pytest
from tests.operator.builders import service
from tests.operator.control_plane import TOKEN, ControlPlane
from tests.operator.harness import poll

from tandem.operator.cluster import Cluster
from tandem.operator.cluster.store import Store
from tandem.operator.loop import watch
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.settings import OperatorSettings

pytestmark = pytest.mark.full


@pytest.fixture
def pod(plane: ControlPlane, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Folder and variables that a kubelet would give a pod."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "ca.crt").write_bytes((plane.home / "certs" / "apiserver.crt").read_bytes())
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(plane.port)}
    return tmp_path, environ


@pytest.fixture
def without_dns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No name is known any more; those that were asked for."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **more: Any) -> Any:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            asked.append(str(host))
            raise socket.gaierror(socket.EAI_AGAIN, "no DNS") from None
        return real(host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


def test_watches_need_no_dns(
    pod: tuple[Path, dict[str, str]],
    without_dns: list[str],
    cluster: Cluster,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """With a pod's account alone, events come though no name can be resolved; a login that failed
    is tried again at once."""
    real, tries = watch.service_account, []

    def account() -> kopf.ConnectionInfo | None:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise kopf.LoginError("a file that is just being written")
        return real(*pod)

    monkeypatch.setattr(watch, "service_account", account)
    woken: list[tuple[str, str]] = []
    stop = threading.Event()
    settings = OperatorSettings(namespaces=(namespace,))
    heard = watch.WatchEvents(woken.append, lambda *_, **__: None, Store(), OperatorMetrics())
    arguments = (settings, heard, stop, lambda: (namespace,))
    watching = threading.Thread(target=watch.run, args=arguments)
    watching.start()
    try:
        made = {**service(), "metadata": {"name": "demo", "namespace": namespace}}
        cluster.create(made)
        assert poll(lambda: (namespace, "demo") in woken) is not None
    finally:
        stop.set()
        watching.join(timeout=30)
    assert not watching.is_alive()
    gc.collect()  # a connection left open is a warning, and so this test's failure
    assert without_dns == []


def test_reads_and_writes_need_no_dns(
    pod: tuple[Path, dict[str, str]], without_dns: list[str], monkeypatch: pytest.MonkeyPatch
):
    """The client of everything else speaks to the address, too."""
    folder, environ = pod
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    where = "kubernetes.config.incluster_config"
    monkeypatch.setattr(f"{where}.SERVICE_TOKEN_FILENAME", str(folder / "token"))
    monkeypatch.setattr(f"{where}.SERVICE_CERT_FILENAME", str(folder / "ca.crt"))
    assert isinstance(Cluster().items("LLMService", None), list)
    assert without_dns == []


def test_an_account_is_found_in_pods_only(tmp_path: Path):
    """An IPv6 address gets brackets; without a token or an address there is no account."""
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert watch.service_account(tmp_path, environ) is None
    (tmp_path / "token").write_text("secret\n")
    found = watch.service_account(tmp_path, environ)
    assert found is not None
    assert (found.server, found.token) == ("https://[fd00::1]:443", "secret")
    assert watch.service_account(tmp_path, {}) is None
