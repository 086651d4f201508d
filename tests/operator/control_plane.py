"""A Kubernetes without nodes: etcd, kube-apiserver and, where asked for, kube-controller-manager.

Enough for everything that an API server decides: validation, server-side apply, admission, garbage
collection. The binaries are looked for in ``TANDEM_KUBE_BIN``, where ``make cluster`` builds them,
and in PATH. Loopback only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tandem.cli.serve.children import be_killed_with
from tandem.cli.serve.listening import free_ports

NEEDED = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "openssl")
BUILT = Path(__file__).parents[2] / ".cluster" / "bin"
TOKEN = "test-admin"
OPERATOR_TOKEN = "test-operator"
START_SECONDS = 60.0
AUDIT_LOG = "audit.log"
"""Below the plane's home: every request of the operator, a JSON object a line."""
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": ["operator"]}, {"level": "None"}],
}


def binary(name: str) -> str | None:
    for folder in (os.environ.get("TANDEM_KUBE_BIN"), BUILT):
        if folder and (Path(folder) / name).is_file():
            return str(Path(folder) / name)
    return shutil.which(name)


def missing() -> list[str]:
    return [name for name in NEEDED if binary(name) is None]


@dataclass
class ControlPlane:
    home: Path
    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    api_server: subprocess.Popen[bytes] | None = None

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def kubeconfig(self, server: str | None = None, token: str = TOKEN) -> Path:
        """A kubeconfig of the administrator, or of another token or address."""
        path = self.home / f"kubeconfig-{abs(hash((server, token))):x}"
        authority = str(self.home / "certs" / "apiserver.crt")
        cluster = {"server": server or self.server, "certificate-authority": authority}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        scratch = path.with_suffix(f".{threading.get_ident()}")
        scratch.write_text(json.dumps(content))
        scratch.rename(path)  # an operator may be reading the one before
        return path

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Output of kubectl; with ``check=False`` its errors too."""
        done = subprocess.run(
            [str(binary("kubectl")), "--kubeconfig", str(self.kubeconfig()), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done.stdout if check else done.stdout + done.stderr

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Send one request of the administrator; raise AssertionError if it is refused."""
        said = self._sent(method, path, body)
        assert not said, f"{method} {path}: {said}"

    def refusal(self, path: str, body: dict[str, Any]) -> str:
        """Return the API server's words against a new object; empty if it would take it."""
        return self._sent("POST", path, body, dry_run="&dryRun=All")

    def _sent(self, method: str, path: str, body: dict[str, Any] | None, dry_run: str = "") -> str:
        context = ssl.create_default_context(cafile=str(self.home / "certs" / "apiserver.crt"))
        kind = "merge-patch+json" if method == "PATCH" else "json"
        request = urllib.request.Request(
            f"{self.server}{path}?fieldManager=tests&fieldValidation=Strict{dry_run}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": f"application/{kind}"},
            method=method,
        )
        try:
            urllib.request.urlopen(request, context=context, timeout=60).close()
        except urllib.error.HTTPError as error:
            with error:
                return str(json.loads(error.read())["message"])
        return ""

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """The API server takes connections meanwhile, and answers nothing; then it answers all."""
        assert self.api_server is not None, "no API server runs"
        self.api_server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.api_server.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def kubectl_output(self, *arguments: str) -> Iterator[Callable[[], str]]:
        """kubectl while it runs; what is yielded gives its output so far."""
        command = [str(binary("kubectl")), "--kubeconfig", str(self.kubeconfig()), *arguments]
        with tempfile.NamedTemporaryFile() as output:
            process = subprocess.Popen(command, stdout=output)
            try:
                yield lambda: Path(output.name).read_text()
            finally:
                process.terminate()
                process.wait(timeout=10)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A process whose log is ``name``.log."""
        log = (self.home / f"{name}.log").open("wb")
        command = [str(binary(name)), *arguments]
        # Go's collector takes a fifth of what an API server computes at its own 100.
        environ = {"GOGC": "400", **os.environ}
        killed_too = partial(be_killed_with, os.getpid())  # an API server computes for ever
        process = subprocess.Popen(
            command, env=environ, stdout=log, stderr=log, preexec_fn=killed_too
        )
        log.close()
        self.processes.append(process)
        return process

    def stop(self) -> None:
        """End what was started, the last first, at once: nothing of it is kept."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@contextlib.contextmanager
def control_plane(home: Path, *, controllers: Sequence[str] = ()) -> Iterator[ControlPlane]:
    """An API server with its store below ``home``; ``controllers`` names those to run at once."""
    etcd, peer, port = free_ports(3)
    plane = ControlPlane(home, port)
    try:
        _etcd(plane, etcd, peer)
        _api_server(plane, etcd)
        wait_ready(plane)
        if controllers:
            start_controllers(plane, controllers)
        yield plane
    finally:
        plane.stop()


def _etcd(plane: ControlPlane, port: int, peer: int) -> None:
    client, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    plane.start(
        "etcd",
        f"--data-dir={plane.home / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--log-level=warn",
        "--unsafe-no-fsync",
    )


def _api_server(plane: ControlPlane, etcd: int) -> None:
    key = plane.home / "sa.key"
    subprocess.run(
        [
            str(binary("openssl")),
            "ecparam",
            "-genkey",
            "-name",
            "prime256v1",
            "-noout",
            "-out",
            key,
        ],
        check=True,
        capture_output=True,
    )
    tokens = plane.home / "tokens.csv"
    tokens.write_text(f'{TOKEN},admin,admin,"system:masters"\n{OPERATOR_TOKEN},operator,operator\n')
    policy = plane.home / "audit.json"
    policy.write_text(json.dumps(_AUDIT))
    plane.api_server = plane.start(
        "kube-apiserver",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={plane.home / AUDIT_LOG}",
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={plane.port}",
        f"--cert-dir={plane.home / 'certs'}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.97.0.0/20",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--disable-admission-plugins=ServiceAccount",
        "--allow-privileged=true",
        "--endpoint-reconciler-type=none",
    )


def start_controllers(plane: ControlPlane, names: Sequence[str]) -> None:
    """Run some controllers; after the CRDs, else garbage collection learns of them half a minute
    later."""
    (port,) = free_ports(1)
    config = plane.kubeconfig()
    plane.start(
        "kube-controller-manager",
        f"--kubeconfig={config}",
        f"--controllers={','.join(names)}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        f"--cert-dir={plane.home / 'manager-certs'}",
    )


def wait_ready(plane: ControlPlane) -> None:
    """Until /readyz answers, or an error with the log's end."""
    context = ssl._create_unverified_context()
    request = urllib.request.Request(
        plane.server + "/readyz", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(request, context=context, timeout=2).status == 200:
                return
        if any(process.poll() is not None for process in plane.processes):
            break
        time.sleep(0.2)
    log = (plane.home / "kube-apiserver.log").read_text()[-2000:]
    raise RuntimeError(f"the API server did not become ready:\n{log}")
