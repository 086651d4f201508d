"""Labels, annotations and pull secrets that a service gives to all of its children and pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.operator.builders import service
from tests.operator.control_plane import ControlPlane
from tests.operator.harness import Harness, services
from tests.operator.test_children import facts

from tandem.operator.desired import secrets
from tandem.operator.desired.compose import desired, target_revisions
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.fetching import job_revision
from tandem.operator.desired.job import model_job
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.workload import rendered
from tandem.operator.settings import OperatorSettings
from tandem.protocol.errors import InvalidParameter

pytestmark = pytest.mark.full

LABELS = {"team": "a", "example.com/cost": "b"}
NOTES = {"example.com/owner": "someone@example.com"}
GIVEN: dict[str, Any] = {
    "labels": LABELS,
    "annotations": NOTES,
    "imagePullSecrets": [{"name": "registry"}],
    "decode__scaling": {"mode": "External"},
}
SAFE = "cluster-autoscaler.kubernetes.io/safe-to-evict"


def children(given: Facts) -> list[Manifest]:
    """All children of a service, its Secrets among them."""
    counts = {(role, given.revision(role)): 1 for role in Role}
    objects = desired(given, counts, {})
    keys = [secrets.keys(given, role, "x", "y") for role in Role]
    return [*objects.applied, *objects.created, *keys, secrets.canary_token(given, "x")]


def templates(given: Facts) -> Iterator[Manifest]:
    """Templates of the pods of all roles and of the model's Job."""
    for role in Role:
        yield rendered(given, role)
    job = model_job(given)
    assert job is not None
    yield job["spec"]["template"]


def test_all_children_and_pods_have_the_labels_and_annotations():
    """Accounts, Roles, policies, budgets, Secrets, Services, scalers, Jobs and workloads."""
    given = facts(**GIVEN)
    made = [*children(given), *templates(given)]
    assert {each.get("kind") for each in made} >= {
        *("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Secret", "NetworkPolicy"),
        *("PodDisruptionBudget", "Service", "Deployment", "ControllerRevision", "Job"),
        "LLMRoleScaler",
    }
    for each in made:
        assert LABELS.items() <= each["metadata"]["labels"].items(), each
        assert NOTES.items() <= each["metadata"]["annotations"].items(), each
        assert each["metadata"]["labels"]["app.kubernetes.io/name"] == "tandem"


def test_all_pods_have_the_pull_secrets():
    """Of roles and of the model's Job; a podTemplate adds its own, or replaces them."""
    for each in templates(facts(**GIVEN)):
        assert each["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    added = facts(**GIVEN, decode__podTemplate={"spec": {"imagePullSecrets": [{"name": "own"}]}})
    prefill, decode, _, job = templates(added)
    both = [{"name": "registry"}, {"name": "own"}]
    assert decode["spec"]["imagePullSecrets"] == job["spec"]["imagePullSecrets"] == both
    assert prefill["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    instead = {"spec": {"imagePullSecrets": [{"$patch": "replace"}, {"name": "own"}]}}
    _, decode, _, job = templates(facts(**GIVEN, decode__podTemplate=instead))
    own = [{"name": "own"}]
    assert decode["spec"]["imagePullSecrets"] == job["spec"]["imagePullSecrets"] == own


def test_a_pod_template_wins_over_them_and_they_win_over_defaults():
    """A podTemplate's labels and annotations are the role's; the service's are not protected."""
    more = {"metadata": {"labels": {"team": "b"}, "annotations": {SAFE: "true"}}}
    given = facts(labels={"team": "a"}, annotations={SAFE: "false"}, decode__podTemplate=more)
    prefill, decode = rendered(given, Role.PREFILL), rendered(given, Role.DECODE)
    assert prefill["metadata"]["labels"]["team"] == "a"
    assert prefill["metadata"]["annotations"][SAFE] == "false"
    assert decode["metadata"]["labels"]["team"] == "b"
    assert decode["metadata"]["annotations"][SAFE] == "true"
    note = facts(annotations={"a": "b"}, router__service={"annotations": {"a": "c"}})
    (made,) = [each for each in children(note) if each["kind"] == "Service"]
    assert made["metadata"]["annotations"] == {"a": "c"}


@pytest.mark.parametrize("field", ["labels", "annotations", "imagePullSecrets"])
def test_a_change_of_them_is_a_new_revision_of_all_roles(field: str):
    """Pods are made again with them; empty ones are no change."""
    before, after = target_revisions(facts()), target_revisions(facts(**{field: GIVEN[field]}))
    assert all(before[role] != after[role] for role in Role)
    assert target_revisions(facts(**{field: type(GIVEN[field])()})) == before


def test_pull_secrets_of_the_operator_are_for_services_that_name_none():
    """They are in templates that are made from now on, and change no revision."""
    settings = OperatorSettings(service_pull_secrets=("shared", "other"))
    given, named = (
        msgspec.structs.replace(each, settings=settings) for each in (facts(), facts(**GIVEN))
    )
    for each in templates(given):
        assert each["spec"]["imagePullSecrets"] == [{"name": "shared"}, {"name": "other"}]
    for each in templates(named):
        assert each["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert target_revisions(given) == target_revisions(facts())
    key = Role.DECODE, given.revision(Role.DECODE)
    stored = rendered(facts(), Role.DECODE)
    (workload,) = [
        each
        for each in desired(given, {key: 1}, {key: stored}).applied
        if each["kind"] == "Deployment"
    ]
    assert workload["spec"]["template"] == stored


def test_a_job_that_lacked_its_pull_secret_is_made_again():
    """What a Job is made of names the secrets of the service, or of the operator."""
    with_shared = OperatorSettings(service_pull_secrets=("shared",))
    plain, named = facts().spec, facts(**GIVEN).spec
    found = {
        job_revision(plain, OperatorSettings()),
        job_revision(plain, with_shared),
        job_revision(named, OperatorSettings()),
    }
    assert len(found) == 3
    assert job_revision(named, with_shared) == job_revision(named, OperatorSettings())


@pytest.mark.parametrize("secrets", [("A",), ("a..b",), ("-a",), ("",), ("a", "a"), ("a" * 254,)])
def test_the_operator_refuses_names_that_no_secret_has(secrets: tuple[str, ...]):
    """Before it starts, by the flag."""
    with pytest.raises(InvalidParameter, match="service_pull_secrets"):
        OperatorSettings(service_pull_secrets=secrets)


RESERVED = [
    *("tandem.dev/role", "tandem.dev/x", "app.kubernetes.io/name", "app.kubernetes.io/instance"),
    *("app.kubernetes.io/component", "app.kubernetes.io/managed-by", "pod-template-hash"),
    *("controller-uid", "job-name", "batch.kubernetes.io/job-name"),
    *("batch.kubernetes.io/controller-uid", "deployment.kubernetes.io/revision"),
]
SAME = {"apiKeysSecretRef": {"name": "keys"}, "adminKeysSecretRef": {"name": "keys"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"label {key}": ({"labels": {key: "x"}}, "labels may not have") for key in RESERVED},
    **{
        f"annotation {key}": ({"annotations": {key: "x"}}, "annotations may not have")
        for key in (*RESERVED, "tandem.dev/secrets", "tandem.dev/wire")
    },
    **{
        f"{field} {key!r:.20}": ({field: {key: "x"}}, f"a key of {field} must be")
        for field in ("labels", "annotations")
        for key in ("a b", "", "/a", "a/", "A.b/c", "a/b/c", "x" * 64, "-a", "a\n")
    },
    "label value": ({"labels": {"a": "b c"}}, "spec.labels.a"),
    "long label value": ({"labels": {"a": "b" * 64}}, "spec.labels.a"),
    "many labels": ({"labels": {f"a{i}": "" for i in range(33)}}, "at most 32"),
    "many annotations": ({"annotations": {f"a{i}": "" for i in range(33)}}, "at most 32"),
    "long annotation": ({"annotations": {"a": "b" * 4097}}, "spec.annotations.a"),
    "pull secret": ({"imagePullSecrets": [{"name": "A"}]}, "spec.imagePullSecrets[0].name"),
    "pull secret twice": (
        {"imagePullSecrets": [{"name": "a"}, {"name": "a"}]},
        "spec.imagePullSecrets[1]: Duplicate",
    ),
    "many pull secrets": (
        {"imagePullSecrets": [{"name": f"a{i}"} for i in range(17)]},
        "at most 16",
    ),
    "one Secret for clients and administrators": (
        {"router__auth": SAME},
        "every API key would be an administration key",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_children_cannot_have_is_refused_at_once(plane: ControlPlane, what: str):
    changes, said = REFUSED[what]
    answer = plane.refusal(services("default"), service(**changes))
    assert said in answer, answer


def test_the_api_server_takes_all_that_may_be_given(harness: Harness):
    """As many labels and annotations as allowed, with the longest keys and values."""
    prefix = ".".join(["a" * 62] * 4)
    long = {f"{prefix}/{i:02}{'k' * 61}": "v" * 63 for i in range(30)}
    harness.create(
        labels={**long, "app.kubernetes.io/part-of": "x", "empty": ""},
        annotations=dict.fromkeys(long, "v" * 4096),
        imagePullSecrets=[{"name": f"a{i}"} for i in range(16)],
    )
    harness.ready()


def test_a_served_service_gets_labels_secrets_and_administrators(harness: Harness):
    """On an API server: the children have them, a label that is taken away goes, and the Secret
    of administrators is mounted in routers."""
    for name in ("keys", "admins"):
        harness.kubectl("create", "secret", "generic", name, "--from-literal=a=b")
        harness.kubectl("label", "secret", name, "tandem.dev/llmservices=allowed")
    auth = {"apiKeysSecretRef": {"name": "keys"}, "adminKeysSecretRef": {"name": "admins"}}
    harness.create(**GIVEN, router__auth=auth)
    harness.ready()
    kinds = ("Deployment", "Job", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")
    for kind in (*kinds, "ConfigMap", "ControllerRevision", "Role", "RoleBinding", "Service"):
        found = [
            each
            for each in harness.cluster.items(kind, harness.namespace)
            if each["metadata"].get("labels", {}).get("tandem.dev/service") == "demo"
        ]
        assert found, kind
        for each in found:
            assert LABELS.items() <= each["metadata"]["labels"].items(), kind
    (router,) = [
        each
        for each in harness.cluster.items("Deployment", harness.namespace)
        if "-router-" in each["metadata"]["name"]
    ]
    pod = router["spec"]["template"]["spec"]
    assert "admins" in [each.get("secret", {}).get("secretName") for each in pod["volumes"]]
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert variables["TANDEM_ADMIN_API_KEYS_DIR"] == "/etc/tandem/admin-api-keys"
    harness.change({"spec": {"labels": {"team": None}}})

    def labels() -> dict[str, str]:
        made = harness.cluster.get("Service", harness.namespace, "demo")
        assert made is not None
        found: dict[str, str] = made["metadata"]["labels"]
        return found

    harness.wait(lambda: "team" not in labels())
    assert labels()["example.com/cost"] == "b"
