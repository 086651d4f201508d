"""The commands of docs/install.md and operations.md as they stand there, in the order in which one
needs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e_cluster.install import NAMESPACE, RELEASE, Installed, helm
from tests.e2e_cluster.kube import Kube
from tests.e2e_cluster.manual import RUN, sections
from tests.e2e_cluster.service import KIND, NAME, prepare_namespace, sample
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.volumes import remove_volumes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.usefixtures("own_cluster")]

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = Path("/srv/models")
MADE_HERE = MODELS / ".made-by-the-tests-of-the-documents"
PORTS = "Ports of the API server"
ORDER = ("With Helm", PORTS, "The CPU demo", "Upgrade", "Uninstall", "Without Helm")
SAID = {"The CPU demo": "Paris"}


@pytest.fixture(scope="module")
def bare(cluster: Kube, setup: Setup, operator: Installed) -> Iterator[Kube]:
    """The cluster without an operator, and nothing of it is left afterwards: these tests are the
    last, and who begins anew installs it."""
    if MADE_HERE.exists():  # a run that was cut off
        shutil.rmtree(MODELS)
    assert not MODELS.exists(), f"{MODELS} is in use on this machine"
    MODELS.mkdir(parents=True)
    MADE_HERE.touch()
    helm(cluster, "uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")
    if setup.mounted:
        prepare_namespace(cluster, Setup(**{**vars(setup), "models": None}))
    yield cluster
    run(cluster, "kubectl delete -k manifests --ignore-not-found")
    run(cluster, "kubectl delete -f manifests/samples/models-folder.yaml --ignore-not-found")
    remove_volumes(cluster)
    shutil.rmtree(MODELS, ignore_errors=True)


def run(cluster: Kube, script: str) -> str:
    """What a shell in the checkout says to a block of commands."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=REPOSITORY,
        env={**os.environ, "KUBECONFIG": cluster.kubeconfig, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fit(cluster: Kube, setup: Setup) -> None:
    """Give the demo's pods what a thin worker image lacks; a whole one needs nothing."""
    if setup.mounted:
        spec = sample(setup)["spec"]
        roles = {role: {"podTemplate": spec[role]["podTemplate"]} for role in ("prefill", "decode")}
        cluster.patch(KIND, NAME, {"spec": roles})


@pytest.mark.parametrize("title", ORDER)
def test_what_a_person_types(bare: Kube, setup: Setup, title: str) -> None:
    """Every command that is not marked as not run does what the text says."""
    said = []
    for kind, script in sections()[title]:
        assert kind == RUN
        said.append(run(bare, script))
        if "cpu-demo.yaml" in script:
            fit(bare, setup)
    assert SAID.get(title, "") in "".join(said)
