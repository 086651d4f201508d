"""Changes of a running service on a real API server: rollouts, scaling, rotation, refusals."""

from __future__ import annotations

import pytest
from tests.operator.harness import Harness
from tests.operator.node import FakeRouter, Node, Pod, unschedulable, waiting

from tandem.protocol import names

pytestmark = pytest.mark.full


def of_revision(harness: Harness, role: str, revision: str) -> str:
    return f"demo-{role}-{revision}"


def revisions(harness: Harness) -> dict[str, str]:
    found: dict[str, str] = harness.service()["status"]["rollout"]["targets"]
    return found


def pods(harness: Harness, role: str) -> list[Pod]:
    selector = f"{names.LABEL_ROLE}={role}"
    return harness.cluster.items("Pod", harness.namespace, selector)


def test_a_change_rolls_pilot_first_and_ends_alone(harness: Harness):
    """A new engine setting replaces all workers, router untouched, the old Deployments gone to 0
    and then away."""
    harness.create(prefill__replicas=2, decode__replicas=2)
    harness.ready()
    before = revisions(harness)
    harness.change({"spec": {"engine": {"maxNumSeqs": 7}}})
    harness.wait(lambda: harness.condition("Progressing")[1] == "RollingOut")
    harness.wait(lambda: harness.condition("Progressing")[1] == "Stable", text="rolled")
    after = revisions(harness)
    assert after["router"] == before["router"]
    assert after["decode"] != before["decode"]
    wanted = {
        of_revision(harness, "decode", after["decode"]): 2,
        of_revision(harness, "prefill", after["prefill"]): 2,
        of_revision(harness, "router", after["router"]): 2,
    }
    harness.wait(lambda: harness.replicas() == wanted, text="only new Deployments")
    harness.wait(lambda: len(harness.names("ControllerRevision")) == 3)
    admitted = [pod["metadata"]["annotations"] for pod in pods(harness, "decode")]
    assert all(each[names.ANNOTATION_ADMITTED] == "true" for each in admitted)
    assert harness.condition("Ready")[0] == "True"


def test_a_revision_that_does_not_come_up_is_taken_back(harness: Harness, node: Node):
    """The old counts are restored, Degraded says why, and the service stays Ready."""
    harness.create(decode__replicas=2)
    harness.ready()
    good = revisions(harness)

    def broken(pod: Pod) -> Pod | None:
        bad = pod["metadata"]["labels"].get(names.LABEL_REVISION) not in good.values()
        job = names.LABEL_REVISION not in pod["metadata"]["labels"]
        if not bad or job:
            return None
        return waiting("ImagePullBackOff", "registry.example.com/worker:none not found")

    def is_told() -> bool:
        statuses = [pod.get("status", {}) for pod in pods(harness, "decode") if broken(pod)]
        return any("containerStatuses" in each for each in statuses)

    node.rules.append(broken)
    harness.change({"spec": {"image": "registry.example.com/worker:none"}})
    harness.wait(is_told, text="the kubelet's word")
    # Not before: a good revision comes up as slowly as the machine lets it.
    harness.change({"spec": {"rollout": {"progressDeadlineSeconds": 8}}})
    told: list[tuple[str, str, str]] = []

    def given_up() -> bool:
        told.append(harness.condition("Degraded"))
        return told[-1][1] == "ProgressDeadlineExceeded"

    harness.wait(given_up, text="given up")
    assert "registry.example.com/worker:none not found" in told[-1][2]
    wanted = {"prefill": 1, "decode": 2, "router": 2}
    harness.wait(
        lambda: all(
            harness.replicas().get(of_revision(harness, role, good[role])) == count
            for role, count in wanted.items()
        ),
    )
    assert harness.condition("Ready")[0] == "True"
    assert harness.condition("Degraded") == told[-1]  # its pods are gone
    harness.change({"spec": {"image": None, "rollout": None}})
    harness.wait(lambda: harness.condition("Degraded")[0] == "False", text="healthy again")


def test_clients_stay_with_routers_that_answered(harness: Harness, router: FakeRouter):
    """Another model brings routers of its own; clients reach them only after the canary."""
    harness.create()
    harness.ready()
    old = revisions(harness)["router"]
    path = "jsonpath={.spec.selector.tandem\\.dev/revision}"
    assert harness.kubectl("get", "svc", "demo", "-o", path) == ""
    router.spared, router.wrong = revisions(harness)["decode"], True
    source = {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}
    harness.change({"spec": {"model": {"source": source}}})
    harness.wait(lambda: harness.kubectl("get", "svc", "demo", "-o", path) == old)
    harness.wait(lambda: "with KV: ' 99'" in harness.condition("Progressing")[2])
    assert harness.condition("Servable")[1] == "CanaryOK"  # of those who serve
    assert harness.kubectl("get", "svc", "demo", "-o", path) == old
    router.wrong = False
    harness.wait(lambda: harness.condition("Progressing")[1] == "Stable")
    assert harness.kubectl("get", "svc", "demo", "-o", path) == ""


def pod_names(harness: Harness, role: str, revision: str) -> list[str]:
    """Names of the pods of a role's revision."""
    mine = [pod["metadata"] for pod in pods(harness, role)]
    return [each["name"] for each in mine if each["labels"][names.LABEL_REVISION] == revision]


@pytest.mark.parametrize(
    "third", [pytest.param(9, marks=pytest.mark.nightly), None], ids=["another", "taken back"]
)
def test_a_change_during_a_rollout_leaves_the_last_decode_worker(
    harness: Harness, node: Node, third: int | None
):
    """It is a new one when the spec changes once more, or is taken back: it stays until its
    successor is there."""
    harness.create(prefill__replicas=3)
    harness.ready()
    first = revisions(harness)
    up = {name for role in first for name in pod_names(harness, role, first[role])}
    held = [True]

    def loads(pod: Pod) -> Pod | None:
        metadata = pod["metadata"]
        late = names.LABEL_REVISION in metadata["labels"] and metadata["name"] not in up
        return waiting("ContainerCreating", "") if late and held[0] else None

    node.rules.append(loads)
    harness.change({"spec": {"engine": {"maxNumSeqs": 7}}})
    harness.wait(lambda: revisions(harness)["decode"] != first["decode"])
    second = revisions(harness)

    def pilots() -> list[list[str]]:
        return [pod_names(harness, role, second[role]) for role in ("prefill", "decode")]

    harness.wait(lambda: all(pilots()), text="pilots")
    up.update(*pilots())
    of = [of_revision(harness, "decode", each["decode"]) for each in (first, second)]
    harness.wait(lambda: harness.replicas().get(of[0]) == 0, text="decode has rolled")
    # One that still went would be back at once where the spec is taken back, and nobody would load.
    harness.wait(lambda: not pod_names(harness, "decode", first["decode"]), text="the old one left")
    harness.change({"spec": {"engine": {"maxNumSeqs": third}}})
    harness.wait(lambda: revisions(harness)["decode"] != second["decode"])
    last = of_revision(harness, "decode", revisions(harness)["decode"])
    harness.wait(lambda: harness.replicas().get(last) == 1)
    harness.wait(lambda: pod_names(harness, "decode", revisions(harness)["decode"]), text="its pod")
    assert harness.replicas()[of[1]] == 1
    assert harness.condition("Ready")[0] == "True"
    assert pod_names(harness, "decode", second["decode"])
    held[0] = False
    harness.wait(lambda: harness.condition("Progressing")[1] == "Stable")
    harness.wait(lambda: harness.replicas().get(of[1], 0) == 0)
    assert harness.replicas()[last] == 1


def test_a_scaler_decides_within_bounds(harness: Harness):
    """An LLMRoleScaler is seeded once, obeyed within its bounds, and shows /scale."""
    harness.create(decode__scaling={"mode": "External", "minReplicas": 1, "maxReplicas": 3})
    harness.ready()
    harness.kubectl("scale", "llmscale", "demo-decode", "--replicas=2")
    name = of_revision(harness, "decode", revisions(harness)["decode"])
    harness.wait(lambda: harness.replicas()[name] == 2)
    harness.kubectl("scale", "llmscale", "demo-decode", "--replicas=9")
    harness.wait(lambda: harness.replicas()[name] == 3)
    harness.wait(lambda: harness.condition("ScalingActive")[1] == "OutOfBounds")
    path = "jsonpath={.status.replicas} {.status.selector}"
    harness.wait(
        lambda: harness.kubectl("get", "llmscale", "demo-decode", "-o", path).startswith(
            "3 app.kubernetes.io/name=tandem"
        ),
    )
    harness.change({"spec": {"decode": {"scaling": None, "replicas": 1}}})
    harness.wait(lambda: harness.names("LLMRoleScaler") == set())
    harness.wait(lambda: harness.replicas()[name] == 1)


def is_marked(pod: Pod) -> bool:
    marked: bool = pod["metadata"].get("annotations", {}).get(names.ANNOTATION_DRAINING) == "true"
    return marked


def test_a_pod_that_will_leave_is_marked_first(harness: Harness):
    """Before a Deployment shrinks, the pod that is to go is marked for the routers."""
    harness.create(decode__replicas=3)
    harness.ready()
    with harness.watch("pods", f"{names.LABEL_ROLE}=decode") as seen:
        harness.wait(lambda: len(seen()) >= 3, text="a watch")
        assert not any(is_marked(pod) for _, pod in seen())
        harness.change({"spec": {"decode": {"replicas": 2}}})
        harness.wait(lambda: len(pods(harness, "decode")) == 2)
        harness.wait(lambda: any(kind == "DELETED" for kind, _ in seen()), text="its end is heard")
        changes = seen()
    mark = next(at for at, (_, pod) in enumerate(changes) if is_marked(pod))
    leave = next(
        at
        for at, (kind, pod) in enumerate(changes)
        if kind == "DELETED" or "deletionTimestamp" in pod["metadata"]
    )
    assert mark < leave
    # A controller that has not heard of the mark yet takes another pod; then the mark goes.
    harness.wait(
        lambda: not any(map(is_marked, pods(harness, "decode"))), text="nobody who stays is marked"
    )


def test_a_rotation_publishes_before_it_rolls(harness: Harness):
    """keyRotationID makes new keys and says what it waits for."""
    harness.create()
    harness.ready()
    harness.change({"spec": {"security": {"keyRotationID": "a"}}})
    harness.wait(lambda: "demo-router-g2" in harness.key_pairs())
    harness.wait(lambda: harness.condition("Progressing")[1] == "WaitingForKeys")
    assert harness.condition("Ready")[0] == "True"
    assert harness.service()["status"]["keys"]["rotating"] is True


def test_keys_rotated_while_suspended_take_the_old_ones_with_them_last(harness: Harness):
    """On resume the stable revision comes first, with the keys that its template mounts; the rest
    of the rotation follows it."""
    harness.create()
    harness.ready()
    harness.change({"spec": {"suspend": True}})
    roles = ("prefill", "decode", "router")
    harness.wait(lambda: not any(pods(harness, role) for role in roles), text="no pods")
    harness.change({"spec": {"security": {"keyRotationID": "a"}}})
    both = {f"demo-{role}-g{n}" for role in roles for n in (1, 2)}
    harness.wait(lambda: harness.service()["status"]["keys"].get("generation") == 2)
    assert harness.key_pairs() == both
    assert harness.service()["status"]["keys"]["rotating"] is True
    harness.change({"spec": {"suspend": False}})
    harness.wait(lambda: harness.key_pairs() == {name for name in both if name.endswith("2")})
    harness.wait(lambda: harness.condition("Progressing")[1] == "Stable")


def test_a_rotation_waits_for_pods_and_no_longer(harness: Harness, router: FakeRouter):
    """Pods that lack the keys are brought to their kubelets' notice; when all say that they have
    them the rotation goes on, long before the time of those who say nothing."""
    router.keys = [f"{role}.1" for role in ("prefill", "decode", "router")]
    harness.create()
    harness.ready()
    harness.change({"spec": {"security": {"keyRotationID": "a"}}})
    harness.wait(lambda: harness.condition("Progressing")[1] == "WaitingForKeys")

    def nudged() -> bool:
        found = [pod for role in ("prefill", "decode", "router") for pod in pods(harness, role)]
        marks = [pod["metadata"].get("annotations") or {} for pod in found]
        return all(names.ANNOTATION_KEYS_WANTED in each for each in marks)

    harness.wait(nudged, text="all pods are nudged")
    assert harness.condition("Progressing")[1] == "WaitingForKeys"
    router.keys += [f"{role}.2" for role in ("prefill", "decode", "router")]
    wanted = {f"demo-{role}-g2" for role in ("prefill", "decode", "router")}
    harness.wait(lambda: harness.key_pairs() == wanted)
    assert harness.service()["status"]["keys"]["read"] == 2
    harness.wait(lambda: harness.condition("Progressing")[1] == "Stable")


def test_a_missing_claim_is_named(harness: Harness):
    """A volume that is not there is in the condition at once; no pod waits for it."""
    harness.create(model__source__persistentVolumeClaim={"claimName": "nowhere"})
    harness.wait(lambda: harness.condition("ModelReady")[1] == "ClaimNotFound")
    assert "nowhere" in harness.condition("Ready")[2]
    assert harness.names("Deployment") == set()


def test_a_model_that_is_not_there_is_named(harness: Harness, node: Node):
    report = node.report
    node.report = {"ok": False, "reason": "ModelNotFound", "message": "no folder /models/smollm2"}
    try:
        harness.create()
        harness.wait(lambda: harness.condition("ModelReady")[1] == "ModelNotFound")
        assert harness.condition("ModelReady")[2].startswith("no folder /models/smollm2")
    finally:
        node.report = report


def test_a_spec_that_does_not_fit_the_model_is_named(harness: Harness):
    """More tokens than the model was made for are told from its config."""
    harness.create(engine__maxModelLen=10**6)
    harness.wait(lambda: harness.condition("ModelReady")[1] == "ModelMismatch")
    assert "the model was made for" in harness.condition("ModelReady")[2]


def test_an_image_that_does_not_exist_is_named(harness: Harness, node: Node):
    """The role's condition and Ready carry the kubelet's words."""

    def broken(pod: Pod) -> Pod | None:
        if pod["metadata"]["labels"].get(names.LABEL_ROLE) != "decode":
            return None
        return waiting("ErrImagePull", "not found")

    node.rules.append(broken)
    harness.create()
    harness.wait(lambda: harness.condition("DecodeReady")[1] == "ImagePull")
    harness.wait(lambda: harness.condition("Ready")[1] == "ImagePull")


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_pods_that_never_fit_are_named_after_a_minute(harness: Harness, node: Node):
    """Unschedulable after sixty seconds, in the scheduler's words."""

    def stuck(pod: Pod) -> Pod | None:
        is_decode = pod["metadata"]["labels"].get(names.LABEL_ROLE) == "decode"
        return unschedulable(pod) if is_decode else None

    node.rules.append(stuck)
    harness.create()
    harness.wait(lambda: harness.condition("DecodeReady")[1] == "Unschedulable", 75)
    assert "Insufficient gpu" in harness.condition("Ready")[2]
