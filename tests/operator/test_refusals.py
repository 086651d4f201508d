"""What is refused in words, on a real API server: Accepted=False with the field and what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.operator.harness import Harness

pytestmark = pytest.mark.full

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "conflict": (
        {"decode__podTemplate": {"spec": {"serviceAccountName": "x"}}},
        "PodTemplateConflict",
        "serviceAccountName",
    ),
    "unknown field": (
        {"decode__podTemplate": {"spec": {"nodeSelectors": {"a": "b"}}}},
        "PodTemplateInvalid",
        "nodeSelectors",
    ),
    "privileged": (
        {
            "decode__podTemplate": {
                "spec": {"containers": [{"name": "x", "image": "y"}]},
            }
        },
        "PodTemplateInvalid",
        "restricted",
    ),
    "host network": (
        {"router__podTemplate": {"spec": {"hostNetwork": True}}},
        "PodTemplateConflict",
        "spec.router.podTemplate.spec.hostNetwork: True: this exceeds the baseline",
    ),
}


def test_what_cannot_work_is_refused_in_words(harness: Harness):
    """What only the operator or a dry run can tell is Accepted=False with the field's name."""
    services = {f"s{number}": name for number, name in enumerate(REFUSED)}
    for service, name in services.items():
        harness.create(service, **REFUSED[name][0])
    for service, name in services.items():
        _, reason, said = REFUSED[name]
        is_refused(harness, service, reason)
        assert said in harness.condition("Accepted", service)[2]
        assert harness.condition("Ready", service)[:2] == ("False", reason)
        assert said in harness.kubectl("describe", "llm", service)
    assert harness.names("Deployment") == set()


def is_refused(harness: Harness, service: str, reason: str) -> None:
    """Wait until a service is not accepted for this reason."""
    harness.wait_for(lambda: harness.condition("Accepted", service)[:2] == ("False", reason))


QUOTA: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "small"},
    "spec": {"hard": {"requests.cpu": "1"}},
}


def test_a_quota_is_not_an_invalid_template(harness: Harness):
    """What a quota says has a reason of its own, with the quota's words."""
    harness.kubectl("create", "-f", "-", stdin=json.dumps(QUOTA))
    resources = {"requests": {"cpu": "2"}}
    status = {"status": {**QUOTA["spec"], "used": {"requests.cpu": "0"}}}  # no controller here
    harness.kubectl("patch", "quota", "small", "--subresource=status", "-p", json.dumps(status))
    harness.create(decode__resources=resources, prefill__resources=resources)
    harness.wait(lambda: harness.condition("Accepted")[:2] == ("False", "QuotaExceeded"))
    assert "exceeded quota: small, requested: requests.cpu=2" in harness.condition("Accepted")[2]


def full_of_pods(harness: Harness, *, used: int, hard: int) -> None:
    """A quota of so many pods, its use as no controller counts it here."""
    status = {"hard": {"pods": str(hard)}, "used": {"pods": str(used)}}
    quota = {**QUOTA, "spec": {"hard": status["hard"]}}
    harness.kubectl("create", "-f", "-", stdin=json.dumps(quota))
    patch = json.dumps({"status": status})
    harness.kubectl("patch", "quota", "small", "--subresource=status", "-p", patch)


def test_a_full_quota_is_no_refusal_of_pods_that_take_the_place_of_others(harness: Harness):
    """A rollout in place needs no room beside what runs, unless the new pods ask for more."""
    harness.create(rollout={"surge": "Never"}, prefill__replicas=2, decode__replicas=2)
    harness.ready()
    before = harness.names("Deployment")
    full_of_pods(harness, used=6, hard=6)
    more = {"resources": {"requests": {"cpu": "2"}}}
    harness.change({"spec": {"decode": more}})
    harness.wait(lambda: harness.condition("Accepted")[:2] == ("False", "QuotaExceeded"))
    assert harness.names("Deployment") == before
    harness.change({"spec": {"decode": {"resources": None}, "engine": {"maxNumSeqs": 3}}})
    harness.wait(lambda: harness.condition("Accepted")[0] == "True")
    harness.wait(lambda: len(harness.names("Deployment") - before) > 0)


@pytest.mark.parametrize(("replicas", "used"), [(2, 7), (1, 6)])
def test_a_full_quota_ends_nothing_that_serves(harness: Harness, replicas: int, used: int):
    """One that was lowered below its use takes no pod when another goes; and a last replica is not
    given up for room that may be somebody else's. The old revision serves on."""
    harness.create(
        rollout={"surge": "Never"}, prefill__replicas=replicas, decode__replicas=replicas
    )
    harness.ready()
    before = harness.replicas()
    full_of_pods(harness, used=used, hard=6)
    harness.change({"spec": {"engine": {"maxNumSeqs": 3}}})
    harness.wait(lambda: harness.condition("Accepted")[:2] == ("False", "QuotaExceeded"))
    assert harness.replicas() == before
    assert harness.condition("Ready")[0] == "True"


def test_a_child_that_is_refused_is_told(harness: Harness):
    """A service that gets no Service has no pod either; it says why, and comes up when that ends.
    One that serves says so beside."""
    quota = {**QUOTA, "spec": {"hard": {"services": "0"}}}
    status = {"status": {**quota["spec"], "used": {"services": "0"}}}
    patch = ("patch", "quota", "small", "--subresource=status", "-p", json.dumps(status))
    harness.kubectl("create", "-f", "-", stdin=json.dumps(quota))
    harness.kubectl(*patch)
    harness.create()
    harness.wait(lambda: harness.condition("Accepted")[:2] == ("False", "QuotaExceeded"))
    assert "exceeded quota: small, requested: services=1" in harness.condition("Accepted")[2]
    assert harness.condition("Ready")[:2] == ("False", "QuotaExceeded")
    assert harness.names("Deployment") == set()
    harness.kubectl("delete", "quota", "small")
    harness.kubectl("annotate", "llm", "demo", "look=again")
    harness.ready()
    harness.change({"spec": {"router": {"service": {"annotations": {"my key": "x"}}}}})
    harness.wait(lambda: harness.condition("Accepted")[:2] == ("False", "ChildRefused"))
    assert "my key" in harness.condition("Accepted")[2]
    assert harness.condition("Ready")[0] == "True"


FOREIGN_SECRETS: dict[str, dict[str, Any]] = {
    "a variable": {
        "containers": [
            {
                "name": "main",
                "env": [
                    {"name": "X", "valueFrom": {"secretKeyRef": {"name": "theirs", "key": "a"}}}
                ],
            }
        ]
    },
    "all variables": {
        "containers": [{"name": "main", "envFrom": [{"secretRef": {"name": "theirs"}}]}]
    },
    "a volume": {"volumes": [{"name": "x", "secret": {"secretName": "theirs"}}]},
    "a projection": {
        "volumes": [{"name": "x", "projected": {"sources": [{"secret": {"name": "theirs"}}]}}]
    },
    "a driver": {
        "volumes": [
            {"name": "x", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "theirs"}}}
        ]
    },
}


FROM_THEIRS = {"valueFrom": {"secretKeyRef": {"name": "theirs", "key": "a"}}}
FOREIGN_SECRETS["the Job's proxy"] = {
    "initContainers": [{"name": "fetch", "env": [{"name": "HTTP_PROXY", **FROM_THEIRS}]}]
}


def test_a_secret_is_used_with_its_owners_leave_only(harness: Harness):
    """Whoever may create an LLMService reads no Secret through its pods, whatever way is tried."""
    harness.kubectl("create", "secret", "generic", "theirs", "--from-literal=a=b")
    services = {f"s{number}": spec for number, spec in enumerate(FOREIGN_SECRETS.values())}
    for service, spec in services.items():
        harness.create(service, decode__podTemplate={"spec": spec})
    for service in services:
        is_refused(harness, service, "SecretNotAllowed")
        said = harness.condition("Accepted", service)[2]
        assert "kubectl label secret theirs tandem.dev/llmservices=allowed" in said
    assert harness.names("Deployment") | harness.names("Job") == set()


def test_a_secret_that_a_field_names_needs_leave_too(harness: Harness):
    """Of the API keys, which a router's podTemplate could read; with the label they are used."""
    fields = {"clients": "apiKeysSecretRef", "admins": "adminKeysSecretRef"}
    harness.kubectl("create", "secret", "generic", "theirs", "--from-literal=a=b")
    for service, field in fields.items():
        harness.create(service, router__auth={field: {"name": "theirs"}})
    for service, field in fields.items():
        is_refused(harness, service, "SecretNotAllowed")
        assert f"spec.router.auth.{field}" in harness.condition("Accepted", service)[2]
    harness.kubectl("label", "secret", "theirs", "tandem.dev/llmservices=allowed")
    harness.kubectl("annotate", "llm", *fields, "look=again")
    for service in fields:
        harness.ready(service)


def test_a_refused_change_leaves_the_running_service_alone(harness: Harness):
    """The pods of the last good spec go on when a change cannot be accepted."""
    harness.create()
    harness.ready()
    before = harness.replicas()
    harness.change({"spec": {"decode": {"podTemplate": {"spec": {"hostNetwork": True}}}}})
    harness.wait(lambda: harness.condition("Accepted")[1] == "PodTemplateConflict")
    assert harness.replicas() == before
    assert harness.condition("Ready")[0] == "True"


def test_a_refusal_ends_when_its_cause_does(harness: Harness):
    """A priority class that comes after the service that names it: the next look finds it."""
    late = f"late-{harness.namespace}"
    harness.create(decode__podTemplate={"spec": {"priorityClassName": late}})
    harness.wait(lambda: harness.condition("Accepted")[1] == "PodTemplateInvalid")
    assert late in harness.condition("Accepted")[2]
    harness.plane.kubectl("create", "priorityclass", late, "--value=7")
    harness.kubectl("annotate", "llm", "demo", "look=again")
    harness.wait(lambda: harness.condition("Accepted")[0] == "True")
    harness.ready()
    harness.plane.kubectl("delete", "priorityclass", late)
