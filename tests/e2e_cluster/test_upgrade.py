"""From the release before to this one and back, under load, by the commands of docs/operations.md.

The older chart, its CRDs and its images are those of ``tests.operator.older_release``. No client,
no role and no Secret may notice, whichever way Helm takes the values of the release before.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

import pytest
from tests.e2e_cluster import older
from tests.e2e_cluster.images import PREFIX, prefix, reference, tag
from tests.e2e_cluster.install import NAMESPACE, RELEASE, WAIT_SECONDS, Installed, helm
from tests.e2e_cluster.kube import Json, Kube, KubeError, conditions, wait_for
from tests.e2e_cluster.load import Load
from tests.e2e_cluster.manual import sections
from tests.e2e_cluster.older_jobs import packages_in_jobs
from tests.e2e_cluster.service import Service
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.shared import ONE_EACH, namespace
from tests.operator import older_release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROLES = ("prefill", "decode", "router")
CRDS = ("llmservices.tandem.dev", "llmrolescalers.tandem.dev")
MODES = ("--reuse-values", "--reset-then-reuse-values", "--reset-values")
HOLD = ("Accepted", "ModelReady", "PrefillReady", "DecodeReady", "RouterReady", "Servable", "Ready")
"""Conditions that are True before, meanwhile and after."""
ANSWERS, ANSWER_SECONDS = 3, 240.0
SETTLE_SECONDS = 20.0
"""After a change of leader: two looks at every service, and a canary."""
CHANGES: Json = {"kvTransfer": {"connector": "TCP"}, "router": {"replicas": 2}}
"""TCP: the mounted packages are of this release, and the one before imports another `nixl`."""


@dataclass
class Seen:
    """What one step did, as a row of the table."""

    step: str
    served: int = 0
    failed: int = 0
    rolled: int = 0
    secrets: int = 0
    false: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lost = ", ".join(self.false) or "none"
        return (
            f"| {self.step} | {self.served} | {self.failed} | {self.rolled} | {self.secrets} "
            f"| {lost} |"
        )


class Watched:
    """``with Watched(service) as watched``: conditions of ``HOLD`` that were not True once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.false: set[str] = set()

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            try:
                found = conditions(self._service.get())
            except KubeError:
                continue  # kubectl was late; the next look tells
            self.false |= {
                f"{name} {found[name]['reason']}: {found[name].get('message', '')[:80]}"
                for name in HOLD
                if found[name]["status"] != "True"
            }


def values(tag_of_images: str, *, is_older: bool) -> list[str]:
    """The images that a release is to run, and nothing else."""
    name = older.reference if is_older else reference
    sets = {
        "image.repository": f"{PREFIX if is_older else prefix()}/tandem-operator",
        "image.tag": tag_of_images,
        "routerImage": name("router"),
        "workerImage": name("worker"),
    }
    return [word for key, value in sets.items() for word in ("--set-string", f"{key}={value}")]


def documented(first: str) -> list[str]:
    """The words behind ``helm`` of the command in operations.md's Upgrade that begins so."""
    lines = [line for _, script in sections()["Upgrade"] for line in script.splitlines()]
    found = [line for line in lines if line.startswith(first)]
    assert len(found) == 1, f"operations.md has {len(found)} commands {first}"
    return shlex.split(found[0])[1:]


@pytest.fixture(scope="module")
def upgraded(
    cluster: Kube, setup: Setup, operator: Installed, own_images: None
) -> Iterator[Service]:
    """A service that the release before brought up, with its chart, its CRDs and its images."""
    helm(cluster, "uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--ignore-not-found")
    for each in CRDS:
        cluster.delete("crd", each)
    cluster.within(NAMESPACE).delete("lease", RELEASE)
    with namespace(cluster, setup, "e2e-upgrade") as kube, packages_in_jobs(kube):
        where = ["-n", NAMESPACE, "--create-namespace", "--wait", f"--timeout={WAIT_SECONDS}s"]
        chosen = values(older.TAG, is_older=True)
        helm(cluster, "install", RELEASE, str(older_release.CHART), *where, *chosen)
        served = Service(kube, setup, changes={**ONE_EACH, **CHANGES})
        served.apply()
        served.wait_stable(600.0)
        yield served
        served.delete()
    helm(cluster, "uninstall", RELEASE, "-n", NAMESPACE, "--wait")
    for each in CRDS:
        cluster.delete("crd", each)


@pytest.fixture(scope="module")
def own_images(setup: Setup) -> None:
    """The older release's images are on every node."""
    if not setup.is_own:
        pytest.skip("imports images into nodes: only on the cluster of tests/cluster")
    if not all(each.exists() for each in older.tars()):
        pytest.skip(f"no images of the release before: the clone lacks {older_release.COMMIT[:8]}")
    older.load_images()


def uids(service: Service) -> set[str]:
    return {pod["metadata"]["uid"] for role in ROLES for pod in service.pods(role)}


def secrets(service: Service) -> set[str]:
    found = service.kube.items("secrets", service.selector)
    return {each["metadata"]["uid"] for each in found}


def leads_anew(operator: Installed, before: str) -> None:
    """Until a pod that was not there before leads, and has looked at everything."""
    wait_for("another leader", lambda: operator.holder() not in ("", before), seconds=120)
    time.sleep(SETTLE_SECONDS)


def stepped(cluster: Kube, service: Service, operator: Installed, words: list[str]) -> Seen:
    """Run helm under load, and see what it did."""
    before, kept, leader = uids(service), secrets(service), operator.holder()
    with Watched(service) as watched, Load(service.url()) as load:
        load.wait_served(ANSWERS, ANSWER_SECONDS)
        helm(cluster, *words)
        leads_anew(operator, leader)
        load.wait_served(ANSWERS, ANSWER_SECONDS)
    shown = [word for word in words if "=" not in word and word != "--set-string"]
    return Seen(
        " ".join(shown),
        served=load.tally.served,
        failed=len(load.tally.failures) + len(load.tally.wrong),
        rolled=len(before ^ uids(service)),
        secrets=len(kept ^ secrets(service)),
        false=sorted(watched.false),
    )


@pytest.mark.parametrize("mode", MODES)
def test_an_upgrade_and_the_way_back_are_not_noticed(
    cluster: Kube,
    upgraded: Service,
    operator: Installed,
    capsys: pytest.CaptureFixture[str],
    mode: str,
) -> None:
    """No request fails, no pod and no Secret is another one, and no condition is lost."""
    new = [word for word in documented("helm upgrade") if word not in MODES]
    rows = [
        stepped(cluster, upgraded, operator, [*new, mode, *values(tag(), is_older=False)]),
        stepped(cluster, upgraded, operator, documented("helm rollback")),
    ]
    with capsys.disabled():
        print("\n| step | served | failed | pods changed | Secrets changed | conditions lost |")
        print("|---|---|---|---|---|---|", *rows, sep="\n")
    for row in rows:
        assert (row.failed, row.rolled, row.secrets, row.false) == (0, 0, 0, []), row
        assert row.served


def test_new_images_reach_a_service_by_whole_pairs(
    cluster: Kube, upgraded: Service, operator: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pods of the two releases have no links to each other, and still no request fails."""
    leader = operator.holder()
    words = [word for word in documented("helm upgrade") if word not in MODES]
    helm(cluster, *words, "--reset-values", *values(tag(), is_older=False))
    leads_anew(operator, leader)
    with Load(upgraded.url()) as load:
        load.wait_served(ANSWERS, ANSWER_SECONDS)
        upgraded.patch(rollout={"restartID": "upgraded"})
        upgraded.wait_stable(600.0)
        load.wait_served(ANSWERS, ANSWER_SECONDS)
    with capsys.disabled():
        print(f"\nrestarted on new images: {load.tally}")
    images = {
        each["image"]
        for role in ROLES
        for pod in upgraded.pods(role)
        for each in pod["spec"]["containers"]
    }
    assert images == {reference("router"), reference("worker")}
    load.assert_clean()
