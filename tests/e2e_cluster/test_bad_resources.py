"""Resources that cannot work: refused with the field's name, or told by a condition in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e_cluster.install import Installed
from tests.e2e_cluster.kube import Json, Kube, conditions
from tests.e2e_cluster.service import KIND, Service, resource
from tests.e2e_cluster.setup import Setup
from tests.e2e_cluster.shared import NEVER_FITS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

REFUSED: dict[str, tuple[Json, tuple[str, ...]]] = {
    "a text for a number": ({"decode": {"replicas": "two"}}, ("decode.replicas", "integer")),
    "zero decode workers": ({"decode": {"replicas": 0}}, ("decode.replicas", "at least 1")),
    "an odd block": ({"engine": {"blockSize": 48}}, ("blockSize", "power of two")),
    "an unknown connector": ({"kvTransfer": {"connector": "Pigeon"}}, ("connector", "NIXL")),
    "RDMA over TCP": (
        {"kvTransfer": {"connector": "TCP", "transport": "RDMA"}},
        ("transport", "RDMA"),
    ),
    "more ranks than one": (
        {"prefill": {"parallelism": {"tensor": 2}}},
        ("parallelism.tensor", "must be 1"),
    ),
    "a union with two members": (
        {"model": {"source": {"hub": {"repository": "a/b"}}}},
        ("source", "hub"),
    ),
    "always without prefill": (
        {"disaggregation": {"mode": "Always"}, "prefill": {"replicas": 0}},
        ("disaggregation", "prefill"),
    ),
    "an unknown field": ({"decode": {"replica": 2}}, ("replica", "unknown")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_api_server_refuses(kube: Kube, setup: Setup, operator: Installed, what: str) -> None:
    """The API server says which field is wrong and what is allowed."""
    changes, words = REFUSED[what]
    said = kube.refusal(resource(kube, setup, "bad", changes))
    for word in words:
        assert word in said, said


def test_a_long_name_is_refused(kube: Kube, setup: Setup, operator: Installed) -> None:
    """A name from which no child's name could be made is refused with the limit."""
    said = kube.refusal(resource(kube, setup, "x" * 40, {}))
    assert "metadata.name" in said
    assert "36" in said


NO_CLAIM = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "nowhere"}}
SHOWN: dict[str, tuple[Json, str, str, float]] = {
    "pods that never fit": (
        NEVER_FITS,
        "DecodeReady",
        "Unschedulable",
        90.0,
    ),
    "an image that does not exist": (
        {"image": "127.0.0.1:9/tandem-serving/nothing:0"},  # refused at once, by no name's lookup
        "DecodeReady",
        "ImagePull",
        120.0,
    ),
    "a claim that is not there": (
        {"model": {"source": NO_CLAIM}},
        "ModelReady",
        "ClaimNotFound",
        30.0,
    ),
    "a model that is not there": (
        {"model": {"source": {"persistentVolumeClaim": {"path": "nothing"}}}},
        "ModelReady",
        "ModelNotFound",
        90.0,
    ),
    "a flag that no worker knows": (
        {"decode": {"extraArgs": ["--max-logprob", "3"]}},
        "DecodeReady",
        "CrashLoop",
        120.0,
    ),
    "a template that takes our labels": (
        {"decode": {"podTemplate": {"metadata": {"labels": {"tandem.dev/role": "mine"}}}}},
        "Accepted",
        "PodTemplateConflict",
        30.0,
    ),
    "a template that no API server takes": (
        {"decode": {"podTemplate": {"spec": {"priorityClassName": "nowhere"}}}},
        "Accepted",
        "PodTemplateInvalid",
        30.0,
    ),
}


@pytest.fixture(scope="module")
def shown(kube: Kube, setup: Setup, never_fits: Service) -> Iterator[dict[str, Service]]:
    """All of them at once, since most of the time goes by in waiting; gone afterwards."""
    made = {what: Service(kube, setup, f"bad-{number}") for number, what in enumerate(SHOWN)}
    made["pods that never fit"] = never_fits
    for what, served in made.items():
        served.apply(**SHOWN[what][0])
    yield made
    for served in made.values():
        served.leave()


@pytest.mark.parametrize("what", SHOWN)
def test_a_condition_tells(shown: dict[str, Service], setup: Setup, what: str) -> None:
    """What only time can tell is a condition with its reason, and `kubectl describe` shows it."""
    changes, kind, reason, seconds = SHOWN[what]
    if "model" in changes and not setup.models:
        pytest.skip("needs the model in a folder of the nodes")
    bad = shown[what]
    found = bad.wait_condition(kind, "False", reason, seconds)
    assert found["message"], "a reason without a word for a person"
    described = bad.kube.run("describe", KIND, bad.name)
    assert reason in described
    ready = conditions(bad.get())["Ready"]
    assert ready["status"] != "True"


def test_a_wrong_flag_is_named(shown: dict[str, Service]) -> None:
    """The condition of a worker that ends at once has the worker's own words on the flag."""
    bad = shown["a flag that no worker knows"]
    said = bad.wait_condition("DecodeReady", "False", "CrashLoop", 120)["message"]
    assert "--max-logprob" in said
    assert "usage" not in said


def test_a_person_reads_the_manual(kube: Kube, operator: Installed) -> None:
    """`kubectl explain --recursive` has every field, and fields have descriptions."""
    whole = kube.run("explain", "llm.spec", "--recursive")
    assert "pullPeers" in whole
    one = kube.run("explain", "llm.spec.engine.blockSize")
    assert "power of two" in one


def test_a_person_sees_the_state_in_a_list(shown: dict[str, Service]) -> None:
    """`kubectl get llm` has the columns that a person looks for."""
    bad = shown["pods that never fit"]
    bad.wait_condition("DecodeReady", "False", "Unschedulable", 90)
    header, row = bad.kube.run("get", "llm", bad.name).splitlines()[:2]
    for column in ("READY", "REASON", "MODE", "P", "D", "LINKS", "MODEL", "AGE"):
        assert column in header.split()
    assert "False" in row


def test_the_operator_never_crashed(operator: Installed, restarts_before: int) -> None:
    """None of the above ended an operator's container."""
    assert operator.restarts() == restarts_before
