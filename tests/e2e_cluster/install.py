"""Installing the operator from its chart, as a person would."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e_cluster.images import prefix, reference, tag
from tests.e2e_cluster.kube import Json, Kube

CHART = Path(__file__).resolve().parents[2] / "charts" / "tandem"
NAMESPACE = "tandem-system"
RELEASE = "tandem"
WAIT_SECONDS = 120
LEASE = RELEASE


@dataclass(frozen=True)
class Installed:
    """The operator as it stands in the cluster."""

    kube: Kube
    seconds: float
    """How long the install took, until both replicas were ready."""

    def pods(self) -> list[Json]:
        return self.kube.items("pods", f"app.kubernetes.io/instance={RELEASE}")

    def lease(self) -> Json:
        found = self.kube.find("lease", LEASE) or {"spec": {}}
        spec: Json = found["spec"]
        return spec

    def identity(self) -> str:
        """Who leads, as the Lease says: pod and incarnation; empty when nobody does."""
        holder: str = self.lease().get("holderIdentity") or ""
        return holder

    def holder(self) -> str:
        """Name of the pod that leads; empty when none does."""
        return self.identity().partition("_")[0]

    def restarts(self) -> int:
        statuses = [each for pod in self.pods() for each in pod["status"]["containerStatuses"]]
        return sum(each["restartCount"] for each in statuses)


def helm(kube: Kube, *arguments: str, seconds: float = WAIT_SECONDS + 30) -> str:
    """helm's output. Fails with what it said."""
    words = ["helm", "--kubeconfig", kube.kubeconfig, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def install(cluster: Kube, more: Mapping[str, str] | None = None) -> Installed:
    """Install or upgrade the release in its own namespace, with the images under test; ``more`` are
    further values of the chart."""
    start = time.monotonic()
    values = {"image.repository": f"{prefix()}/tandem-operator", "image.tag": tag()}
    values |= dict(more or {})
    values |= {f"{role}Image": reference(role) for role in ("router", "worker")}
    sets = [word for name, value in values.items() for word in ("--set-string", f"{name}={value}")]
    where = ["--namespace", NAMESPACE, "--create-namespace"]
    wait = ["--wait", f"--timeout={WAIT_SECONDS}s"]
    helm(cluster, "upgrade", "--install", RELEASE, str(CHART), *where, *wait, *sets)
    return Installed(cluster.within(NAMESPACE), time.monotonic() - start)
