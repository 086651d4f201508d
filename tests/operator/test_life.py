"""A service's life on a real API server: it comes up, is repaired, and goes."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest
from tests.operator.harness import Harness
from tests.operator.node import ROUTER_ADDRESS, FakeRouter, Node, Pod

from tandem.protocol import names

pytestmark = pytest.mark.full
CHILDREN = (
    ("ConfigMap", "demo-peers"),
    ("NetworkPolicy", "demo-decode"),
    ("NetworkPolicy", "demo-router"),
    ("PodDisruptionBudget", "demo-prefill"),
    ("Role", "demo-router"),
    ("RoleBinding", "demo-router"),
    ("Service", "demo"),
    ("ServiceAccount", "demo-worker"),
)


@pytest.mark.parametrize(
    ("task", "path"),
    [
        ("Embed", "/v1/embeddings"),
        pytest.param("Classify", "/classify", marks=pytest.mark.nightly),
        pytest.param("Score", "/v1/score", marks=pytest.mark.nightly),
    ],
)
def test_a_service_without_tokens_has_prefill_workers_alone(
    harness: Harness, router: FakeRouter, task: str, path: str
):
    """Ready by a canary that asked prefill workers for what the service is for; a wrong answer is
    told."""
    router.asked.clear()
    harness.create(task=task, decode=None)
    harness.ready()
    secret = harness.secret("demo-canary-")
    token = base64.b64decode(secret["data"][names.CANARY_TOKEN_FILE]).decode()
    ours = [asked for asked in router.asked if asked["tandem-canary"] == token]
    assert {asked["path"] for asked in ours} == {path}
    assert all(asked["tandem-prefill-revision"] for asked in ours)
    assert not any("tandem-decode-revision" in asked for asked in ours)
    assert harness.condition("KVFabricReady")[:2] == ("True", "NotNeeded")
    shown = harness.kubectl("get", "llm", "demo").splitlines()[1].split()
    assert shown[:7] == ["demo", "True", "Ready", "Pooling", "1/1", "0/0", "0/0"]
    assert not any("-decode-" in name for name in harness.names("Deployment"))
    router.wrong = True
    harness.change({"spec": {"rollout": {"restartID": "again"}}})
    harness.wait(lambda: "its canary" in harness.condition("Progressing")[2])


def test_an_answer_that_did_not_cross_the_kv_path_is_not_servable(
    harness: Harness, router: FakeRouter
):
    """A service whose router answers from decode alone says so and is not Ready."""
    router.shape = "aggregated"
    harness.create()
    harness.wait(lambda: harness.condition("Servable")[1] == "CanaryNotDisaggregated")
    assert harness.condition("Ready")[:2] == ("False", "CanaryNotDisaggregated")
    assert harness.service()["status"]["mode"] == "Aggregated"


def test_wrong_tokens_over_the_kv_path_are_not_servable(harness: Harness, router: FakeRouter):
    """Another answer over the KV path than from decode alone is found out."""
    router.wrong = True
    harness.create()
    harness.wait(lambda: harness.condition("Servable")[1] == "CanaryFailed")
    assert "with KV: ' 99'" in harness.condition("Servable")[2]


def locked_out(pod: Pod) -> Pod | None:
    """A router that runs and is not ready."""
    if pod["metadata"]["labels"].get(names.LABEL_ROLE) != "router":
        return None
    return {"phase": "Running", "podIP": ROUTER_ADDRESS, "podIPs": [{"ip": ROUTER_ADDRESS}]}


def test_keys_that_do_not_fit_are_told(harness: Harness, node: Node, router: FakeRouter):
    """A router that no worker lets in says so, and its service too, as long as that lasts."""
    router.refused = ["10.0.0.7:5570"]
    node.rules.append(locked_out)
    harness.create()
    harness.wait(lambda: harness.condition("RouterReady")[1] == "KeysRefused")
    assert "10.0.0.7:5570" in harness.condition("RouterReady")[2]
    assert harness.condition("Ready")[:2] == ("False", "KeysRefused")
    assert harness.condition("Degraded")[:2] == ("True", "KeysRefused")
    node.rules.clear()
    harness.ready()


def test_deleted_children_come_back(harness: Harness):
    """Every child that is deleted is there again; how soon is test_repair's to say."""
    harness.create()
    harness.ready()
    workloads = [("Deployment", name) for name in sorted(harness.names("Deployment"))]
    stored = [("ControllerRevision", name) for name in sorted(harness.names("ControllerRevision"))]
    jobs = [("Job", name) for name in sorted(harness.names("Job"))]
    tokens = [("Secret", harness.secret("demo-canary-")["metadata"]["name"])]
    for kind, name in (*CHILDREN, *tokens, *workloads, *stored, *jobs):
        before = harness.cluster.get(kind, harness.namespace, name)
        assert before is not None, (kind, name)
        harness.cluster.delete(kind, harness.namespace, name)

        def is_back(kind: str = kind, name: str = name, uid: str = before["metadata"]["uid"]):
            now = harness.cluster.get(kind, harness.namespace, name)
            return now is not None and now["metadata"]["uid"] != uid

        harness.wait(is_back, text=f"{kind} {name} is back")


def test_a_lost_key_is_a_rotation(harness: Harness):
    """A deleted key Secret makes a new generation for all roles, which pods get later."""
    harness.create()
    harness.ready()
    lost = harness.secret("demo-decode-keys-")["metadata"]["name"]
    harness.cluster.delete("Secret", harness.namespace, lost)
    wanted = {f"demo-{role}-g2" for role in ("prefill", "decode", "router")}
    harness.wait(lambda: wanted <= harness.key_pairs(), text="generation 2")
    harness.wait(lambda: harness.condition("Progressing")[1] == "WaitingForKeys")
    peers = harness.cluster.get("ConfigMap", harness.namespace, "demo-peers")
    assert peers is not None
    assert {"router.1.public", "router.2.public", "decode.2.public"} <= set(peers["data"])


EDITS: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    ("Service", "demo"): (
        {"spec": {"selector": {"a": "b"}}},
        {"spec": {"ports": [{"port": 9, "name": "x"}]}},
    ),
    ("NetworkPolicy", "demo-decode"): ({"spec": {"ingress": [{}]}},),
    ("PodDisruptionBudget", "demo-decode"): ({"spec": {"maxUnavailable": 5}},),
    ("Role", "demo-router"): (
        {"rules": []},
        {"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]},
    ),
    ("ConfigMap", "demo-peers"): ({"data": {"router.1.public": "x"}},),
}


def edit_and_wait(harness: Harness, kind: str, name: str, patch: dict[str, Any]) -> None:
    """Edit an object, and wait until it is as before."""

    def found() -> dict[str, Any]:
        item = harness.cluster.get(kind, harness.namespace, name)
        assert item is not None
        return item

    (field,) = patch
    before = found()
    harness.edit(kind, name, patch)
    assert found()["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]
    harness.wait(lambda: found()[field] == before[field], text=f"{kind} {name} as it was")


def test_edited_children_are_put_right(harness: Harness):
    """An edit by hand does not last, nor do replicas of a Deployment that are set by hand."""
    harness.create()
    harness.ready()
    for (kind, name), patches in EDITS.items():
        for patch in patches:
            edit_and_wait(harness, kind, name, patch)
    decode = next(each for each in harness.names("Deployment") if "decode" in each)
    harness.edit("Deployment", decode, {"spec": {"replicas": 4}})
    harness.wait(lambda: harness.replicas()[decode] == 1)


def test_deletion_takes_everything(harness: Harness):
    """Nothing of a deleted service stays, and nothing blocks its deletion."""
    harness.create()
    harness.ready()
    harness.kubectl("delete", "llm", "demo", "--wait=true", "--timeout=60s")
    kinds = ("Deployment", "Pod", "Secret", "Service", "NetworkPolicy", "ControllerRevision", "Job")

    def left() -> set[str]:
        return {name for kind in kinds for name in harness.names(kind) if name.startswith("demo")}

    end = time.monotonic() + 30.0
    while left() and time.monotonic() < end:
        time.sleep(0.2)
    assert left() == set()


def test_a_successor_does_not_inherit(harness: Harness):
    """A service that is deleted and made again at once gets keys and children of its own, none of
    them under the name of an earlier Secret: nodes keep those of pods that linger."""
    before: set[str] = set()
    for _ in range(2):
        harness.create()
        harness.ready()
        assert harness.service()["status"]["keys"]["generation"] == 1
        mounted = {
            volume["secret"]["secretName"]
            for pod in harness.cluster.items("Pod", harness.namespace)
            if "deletionTimestamp" not in pod["metadata"]
            and harness.service()["metadata"]["creationTimestamp"]
            <= pod["metadata"]["creationTimestamp"]
            for volume in pod["spec"]["volumes"]
            if "secret" in volume
        }
        ours = {name for name in mounted if name.startswith(("demo-canary-", "demo-router-keys-"))}
        assert not ours & before
        before |= ours
        harness.kubectl("delete", "llm", "demo", "--wait=true")


def test_suspension_keeps_what_is_not_a_pod(harness: Harness):
    """Suspended: no pods, everything else stays; and back."""
    harness.create()
    harness.ready()
    harness.change({"spec": {"suspend": True}})
    harness.wait(lambda: set(harness.replicas().values()) == {0})
    harness.wait(lambda: harness.condition("Ready")[1] == "Suspended")
    assert harness.secret("demo-canary-")
    harness.change({"spec": {"suspend": False}})
    harness.ready()


def test_the_pods_rights_are_minimal(harness: Harness):
    """Routers read pods of their namespace; workers are nobody beyond what everybody may."""
    harness.create()
    harness.wait(lambda: {"demo-router", "demo-worker"} <= harness.names("ServiceAccount"))
    harness.wait(lambda: "demo-router" in harness.names("RoleBinding"))

    def rights(account: str) -> set[str]:
        user = f"--as=system:serviceaccount:{harness.namespace}:{account}"
        rows = harness.kubectl("auth", "can-i", "--list", "--no-headers", user).splitlines()
        return {row.split()[0] + " " + row[row.rindex("[") :] for row in rows if row[0] != " "}

    assert rights("demo-router") - rights("demo-worker") == {"pods [get list watch]"}
    assert not [each for each in rights("demo-worker") if each.startswith(("pods", "secrets"))]
