"""What tests do with an operator at work: ask for things, wait for what follows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.forked import fork_server
from tests.operator.builders import service
from tests.operator.control_plane import ControlPlane

from tandem.operator.cluster import KINDS, Cluster

OPERATOR_NAMESPACE = "tandem-system"
CALM = {"lease_seconds": 30, "renew_deadline": 20, "retry_seconds": 1}
"""Of who finds a Lease that is free: a leader outlives seconds in which all stands still."""
FAST = {"lease_seconds": 6, "renew_deadline": 4}
"""Of who is to lose it: an election that tests can wait for."""


class OperatorProcess:
    """`tandem operator` in a process of its own, forked from one that has imported it."""

    def __init__(
        self,
        home: Path,
        name: str,
        kubeconfig: Path,
        *flags: str,
        namespace: str = OPERATOR_NAMESPACE,
        **timings: float,
    ) -> None:
        self._log = home / f"operator-{name}.log"
        file = home / f"timings-{name}.yaml"
        file.write_text(json.dumps({**CALM, **timings}))
        command = ["operator", "--port", "0"]
        command += ["--timings-file", str(file), *flags]
        environ = {**os.environ, "KUBECONFIG": str(kubeconfig), "TANDEM_POD_NAME": name}
        environ["TANDEM_POD_NAMESPACE"] = namespace
        with self._log.open("wb") as log:
            server = fork_server("operator")
            self.process = server.fork(command, environ, output=log.fileno())

    def log(self) -> str:
        return self._log.read_text()

    def listens(self) -> bool:
        """Whether its probes can be asked, just before it tries for the Lease."""
        for fd in list(Path(f"/proc/{self.process.pid}/fd").iterdir()):
            with suppress(FileNotFoundError):  # closed since
                if int(fd.name) > 2 and os.readlink(fd).startswith("socket:"):
                    return True
        return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=10)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
            self.process.wait(timeout=10)
            raise AssertionError(f"the operator hangs:\n{self.log()[-6000:]}") from None


class Operators:
    """Replicas that end with the test, in an election of their own."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self._flags = ("--namespaces", namespace, "--lease-name", "tandem-operator")
        self._namespace = namespace
        plane.kubectl("-n", namespace, "apply", "-f", "manifests/operator/lease.yaml")
        self.running: list[OperatorProcess] = []

    def start(
        self, name: str, config: Path | None = None, *flags: str, **timings: float
    ) -> OperatorProcess:
        kubeconfig = config or self._plane.kubeconfig()
        name = f"{self._namespace}-{name}"
        process = OperatorProcess(
            self._plane.home,
            name,
            kubeconfig,
            *self._flags,
            *flags,
            namespace=self._namespace,
            **timings,
        )
        self.running.append(process)
        return process


PATIENCE = 90.0
"""Seconds until a test gives up, which is before pytest does; a slow machine is no fault."""


def poll(what: Callable[[], Any], seconds: float = PATIENCE) -> float | None:
    """How long it took until ``what`` was true; None when it was not."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if what():
            return time.monotonic() - started
        time.sleep(0.1)
    return None


def _blanks(text: str) -> int:
    return len(text) - len(text.lstrip())


def services(namespace: str) -> str:
    """Return the path of a namespace's LLMServices."""
    return f"/apis/tandem.dev/v1alpha1/namespaces/{namespace}/llmservices"


class Harness:
    def __init__(self, plane: ControlPlane, cluster: Cluster, namespace: str) -> None:
        self.plane = plane
        self.cluster = cluster
        self.namespace = namespace

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        return self.plane.kubectl("-n", self.namespace, *arguments, stdin=stdin, check=check)

    @contextmanager
    def watch(
        self, kind: str, selector: str
    ) -> Iterator[Callable[[], list[tuple[str, dict[str, Any]]]]]:
        """Every change from now on; what is yielded gives (type of event, object) so far."""
        words = ("-n", self.namespace, "get", kind, "-l", selector, "-o", "json")
        with self.plane.kubectl_output(*words, "--watch", "--output-watch-events") as read:

            def seen() -> list[tuple[str, dict[str, Any]]]:
                text, found, at = read(), [], 0
                while text[at:].strip():
                    try:
                        event, at = json.JSONDecoder().raw_decode(text, at + _blanks(text[at:]))
                    except json.JSONDecodeError:  # the last one is still being written
                        break
                    found.append((event["type"], event["object"]))
                return found

            yield seen

    def create(self, name: str = "demo", **changes: Any) -> None:
        self.plane.send("POST", services(self.namespace), service(name, **changes))

    def make(self, manifest: dict[str, Any]) -> None:
        """Make an object of another than the operator."""
        prefix, plural = KINDS[manifest["kind"]]
        self.plane.send("POST", f"{prefix}/namespaces/{self.namespace}/{plural}", manifest)

    def edit(self, kind: str, name: str, patch: dict[str, Any]) -> None:
        """Send a merge patch of an object."""
        prefix, plural = KINDS[kind]
        path = f"{prefix}/namespaces/{self.namespace}/{plural}/{name}"
        self.plane.send("PATCH", path, patch)

    def change(self, patch: dict[str, Any], name: str = "demo") -> None:
        self.plane.send("PATCH", f"{services(self.namespace)}/{name}", patch)

    def service(self, name: str = "demo") -> dict[str, Any]:
        found = self.cluster.get("LLMService", self.namespace, name)
        assert found is not None
        return found

    def condition(self, kind: str, name: str = "demo") -> tuple[str, str, str]:
        """Status, reason and message of a condition."""
        status = self.service(name).get("status", {})
        for each in status.get("conditions", ()):
            if each["type"] == kind:
                return each["status"], each["reason"], each.get("message", "")
        return "", "", ""

    def names(self, kind: str) -> set[str]:
        """Names of all objects of a kind."""
        return {each["metadata"]["name"] for each in self.cluster.items(kind, self.namespace)}

    def key_pairs(self) -> set[str]:
        """Names of the key Secrets without what the service's UID gives them: role and
        generation."""
        found = (name.split("-keys-") for name in self.names("Secret") if "-keys-" in name)
        return {f"{role}-{rest.partition('-')[2]}" for role, rest in found}

    def secret(self, start: str) -> dict[str, Any]:
        """The one Secret whose name begins so."""
        (found,) = [
            each
            for each in self.cluster.items("Secret", self.namespace)
            if each["metadata"]["name"].startswith(start)
        ]
        return found

    def replicas(self) -> dict[str, int]:
        return {
            each["metadata"]["name"]: each["spec"]["replicas"]
            for each in self.cluster.items("Deployment", self.namespace)
        }

    def wait(self, what: Callable[[], Any], seconds: float = PATIENCE, text: str = "") -> float:
        """Until ``what`` is true; how long it took."""
        took = poll(what, seconds)
        if took is None:
            status = json.dumps(self.service().get("status", {}), indent=1)
            raise AssertionError(f"not within {seconds} s: {text or what}\n{status}")
        return took

    def wait_for(self, what: Callable[[], Any], seconds: float = PATIENCE) -> float:
        """The same where there is no service yet."""
        took = poll(what, seconds)
        assert took is not None, f"not within {seconds} s"
        return took

    def ready(self, name: str = "demo", seconds: float = PATIENCE) -> float:
        """Until the service is Ready; how long it took."""
        took = poll(lambda: self.condition("Ready", name)[0] == "True", seconds)
        assert took is not None, json.dumps(self.service(name).get("status", {}), indent=1)
        return took
