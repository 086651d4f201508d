"""What an LLMService may not do, on a real cluster: take over what is not its own, go beyond the
baseline profile, read other people's Secrets, or be written in a shape that nobody can read."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest
from tests.e2e_cluster.install import NAMESPACE, RELEASE, Installed
from tests.e2e_cluster.kube import Json, Kube, KubeError, conditions, wait_for
from tests.e2e_cluster.service import KIND
from tests.operator.builders import service
from tests.operator.foreign import foreign_objects

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.timeout(300)),
    pytest.mark.usefixtures("never_fits"),  # its minute of waiting goes by meanwhile
]

FOREIGN = foreign_objects()
OPERATOR = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
DEMO = "demo"
TOLD_SECONDS = 30.0


@pytest.fixture
def demo(kube: Kube, operator: Installed) -> Iterator[Kube]:
    """A namespace in which a service ``demo`` may be made; it and its children go afterwards."""
    yield kube
    kube.delete(KIND, DEMO)
    chosen = ("serviceaccounts", f"tandem.dev/service={DEMO}")
    wait_for("its children to go", lambda: not kube.items(*chosen), seconds=60)


def create(kube: Kube, **changes: object) -> None:
    """The service, with changes to its spec."""
    made = service(DEMO, **changes)
    made["metadata"]["namespace"] = kube.namespace
    kube.apply(made)


def told(kube: Kube, reason: str) -> str:
    """The message of Accepted=False once its reason is this one."""

    def check() -> Json | None:
        found = conditions(kube.get(KIND, DEMO)).get("Accepted", {})
        return found if (found.get("status"), found.get("reason")) == ("False", reason) else None

    message: str = wait_for(reason, check, seconds=TOLD_SECONDS)["message"]
    return message


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_ours_is_left_alone(demo: Kube, kind: str) -> None:
    """An object of somebody else under a child's name is named, neither changed nor deleted, and no
    pod starts beside it."""
    foreign = FOREIGN[kind]
    metadata = {**foreign["metadata"], "namespace": demo.namespace}
    name = metadata["name"]
    group = foreign["apiVersion"].rpartition("/")[0]
    resource = f"{kind.lower()}.{group}" if group else kind.lower()
    # Children of the service of the test before are collected one after the other.
    wait_for(f"an earlier {kind} to go", lambda: demo.find(resource, name) is None, seconds=60)
    demo.apply({**foreign, "metadata": metadata})
    before = demo.get(resource, name)["metadata"]
    try:
        create(demo, decode__scaling={"mode": "External"})
        assert f"{kind} {name} " in told(demo, "NameTaken")
        made = {each["metadata"]["name"] for each in demo.items("deployments")}
        assert made <= {name}
        demo.delete(KIND, DEMO)
        chosen = ("serviceaccounts", f"tandem.dev/service={DEMO}")
        wait_for("its children to go", lambda: not demo.items(*chosen), seconds=60)
        after = demo.get(resource, name)["metadata"]
        assert after["uid"] == before["uid"]
        assert after.get("ownerReferences") == before.get("ownerReferences")
        assert after.get("labels") == before.get("labels")
    finally:
        demo.delete(resource, name)


def test_a_foreign_secret_in_a_keys_place_is_told(demo: Kube) -> None:
    """A Secret under the name of the next key stops the rotation and keeps its data."""
    create(demo, suspend=True)
    selector = "tandem.dev/role=decode"
    (first,) = wait_for("the keys", lambda: demo.items("secrets", selector), seconds=30)
    # A rotation is a change of what the status says was wanted before.
    wait_for("the status of keys", lambda: keys_of(demo).get("generation") == 1, seconds=30)
    coming = first["metadata"]["name"].replace("-g1", "-g2")
    data = {"a": base64.b64encode(b"theirs").decode()}
    metadata = {"name": coming, "namespace": demo.namespace}
    demo.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    try:
        demo.patch(KIND, DEMO, {"spec": {"security": {"keyRotationID": "x"}}})
        assert f"Secret {coming} " in told(demo, "NameTaken")
        assert demo.get("secret", coming)["data"] == data
    finally:
        demo.delete("secret", coming)


def keys_of(demo: Kube) -> Json:
    """What the status says of keys; {} before it says anything."""
    keys: Json = demo.get(KIND, DEMO).get("status", {}).get("keys", {})
    return keys


TEMPLATES: dict[str, tuple[Json, str]] = {
    "a pod without any of ours": (
        {"$patch": "replace", "containers": [{"name": "main", "image": "x"}]},
        "PodTemplateConflict",
    ),
    "another account": ({"serviceAccountName": "default"}, "PodTemplateConflict"),
    "the host's processes": ({"hostPID": True}, "PodTemplateConflict"),
    "the host's files": (
        {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]},
        "PodTemplateConflict",
    ),
    "a Secret": (
        {"volumes": [{"name": "x", "secret": {"secretName": "theirs"}}]},
        "SecretNotAllowed",
    ),
}


@pytest.mark.parametrize("what", TEMPLATES)
def test_a_template_is_no_way_around(demo: Kube, what: str) -> None:
    """Also in the router's template, whose pods have a token; nothing is started."""
    metadata = {"name": "theirs", "namespace": demo.namespace}
    demo.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
    spec, reason = TEMPLATES[what]
    create(demo, router__podTemplate={"spec": spec})
    assert "spec.router.podTemplate" in told(demo, reason)
    assert not demo.items("deployments", f"tandem.dev/service={DEMO}")


@pytest.mark.parametrize("spec", [["x"], {"containers": {"main": {}}}, "x"])
def test_a_template_of_another_shape_is_refused(
    kube: Kube, operator: Installed, spec: object
) -> None:
    """When it is written, with the field's name."""
    made = service("bad", decode__podTemplate={"spec": spec})
    made["metadata"]["namespace"] = kube.namespace
    assert "spec.decode.podTemplate.spec" in kube.refusal(made)


def test_the_operator_itself_is_held_to_it(kube: Kube, operator: Installed) -> None:
    """Its account can make no privileged pod, not even through a Deployment of its own."""
    labels = {"a": "b"}
    pod = {"containers": [{"name": "x", "image": "x"}], "hostPID": True}
    spec = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    metadata = {"name": "mine", "namespace": kube.namespace}
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec,
    }  # fmt: skip
    words = ("create", f"--as={OPERATOR}", "--dry-run=server", "-f", "-")
    with pytest.raises(KubeError, match="ValidatingAdmissionPolicy"):
        kube.run(*words, stdin=json.dumps(deployment))


def test_who_may_edit_a_namespace_may_edit_its_services(kube: Kube, operator: Installed) -> None:
    """Kubernetes' own roles view and edit know LLMServices."""
    for role, verb, allowed in (
        ("view", "get", True),
        ("view", "create", False),
        ("edit", "create", True),
        ("admin", "delete", True),
    ):
        rules = kube.get("clusterrole", role)["rules"]
        verbs = {
            each
            for rule in rules
            if "llmservices" in rule.get("resources", ())
            for each in rule["verbs"]
        }
        assert (verb in verbs) is allowed, (role, verb)
