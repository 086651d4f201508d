"""A service that the release before made, taken over by this operator: nothing of it moves."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.operator.builders import spec
from tests.operator.in_memory import KEY, Demo
from tests.operator.older_release import RECORDED
from tests.operator.older_release.specs import SPECS
from tests.operator.test_children import facts

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.cluster import ClusterError
from tandem.operator.cluster.undeclared import Undeclared
from tandem.operator.decide.plan import moved_roles
from tandem.operator.desired.job import model_job
from tandem.operator.desired.naming import WORKERS, Manifest, Role
from tandem.operator.desired.pod import SAFE_TO_EVICT
from tandem.operator.desired.references import secrets_of
from tandem.operator.desired.revision import as_go_writes, is_sorted, revision_of, service_revision
from tandem.operator.desired.workload import RevisionKey, rendered
from tandem.protocol.card import WIRE
from tandem.protocol.names import ANNOTATION_WIRE

OLDER: dict[str, Any] = json.loads(RECORDED.read_text())
FIELDS = ("name", "pinned", "generation")


@pytest.mark.parametrize(
    "known", OLDER["revisions"], ids=lambda each: "-".join(str(each[field]) for field in FIELDS)
)
def test_revisions_are_those_of_the_release_before(known: dict[str, Any]):
    """A spec of that release has the same revisions here, so that an upgrade rolls no role."""
    wanted = msgspec.convert(spec(**SPECS[known["name"]]), LLMServiceSpec)
    found = {
        str(role): revision_of(
            wanted, role, pinned=known["pinned"], key_generation=known["generation"]
        )
        for role in Role
    }
    assert found == known["revisions"]


@pytest.fixture
def demo() -> Iterator[Demo]:
    """The demo, an operator of this release, and all that the one before made of it."""
    found = Demo()
    owner = {"kind": "LLMService", "name": KEY[1], "controller": True}
    service = found.cluster.objects[("LLMService", KEY[1])]
    for item in copy.deepcopy(OLDER["children"]):
        item["metadata"]["ownerReferences"] = [{**owner, "uid": service["metadata"]["uid"]}]
        found.cluster.put(item["kind"], item)
    targets = OLDER["revisions"][0]["revisions"]
    memory = {"targets": targets, "stable": targets, "servable": service_revision(targets)}
    status = {"observedGeneration": 1, "rollout": memory, "keys": {"generation": 1}}
    found.cluster.put("LLMService", {**service, "status": status})
    found.cluster.run()
    found.cluster.writes.clear()
    yield found
    found.close()


def replicas(demo: Demo) -> dict[str, int]:
    return {
        each["metadata"]["name"]: each["spec"]["replicas"] for each in demo.cluster.of("Deployment")
    }


def secrets(demo: Demo) -> dict[str, dict[str, str]]:
    return {each["metadata"]["name"]: each["data"] for each in demo.cluster.of("Secret")}


def pods(demo: Demo) -> set[str]:
    found = demo.cluster.of("Pod")
    return {
        each["metadata"]["uid"] for each in found if "tandem.dev/role" in each["metadata"]["labels"]
    }


def test_an_upgrade_moves_no_role_and_no_secret(demo: Demo):
    """The new operator takes over what is there: the same Deployments, templates, pods, Secrets."""
    before, running, kept = replicas(demo), pods(demo), secrets(demo)
    templates = {
        each["metadata"]["name"]: each["spec"]["template"] for each in demo.cluster.of("Deployment")
    }
    demo.turn(8)
    assert demo.failure is None
    assert replicas(demo) == before
    assert pods(demo) == running
    assert secrets(demo) == kept
    assert templates == {
        each["metadata"]["name"]: each["spec"]["template"] for each in demo.cluster.of("Deployment")
    }
    assert demo.condition("Ready")[0] == "True"
    assert ("delete", "Secret", "demo-canary") not in demo.cluster.writes


def test_canaries_bring_the_token_that_the_old_routers_mount(demo: Demo):
    """The canary's Secret keeps its name, and its token is what is asked with."""
    demo.turn(4)
    assert demo.probes.questions
    assert {question.token for question in demo.probes.questions} == {"older-token"}


def test_what_is_made_after_an_upgrade_mounts_secrets_that_are_there(demo: Demo):
    """A restart, and then a rotation of keys, find their Secrets under the names that the service
    has, so that the operator of the release before would find them, too."""
    demo.turn(4)
    changes: list[dict[str, Any]] = [{"rollout__restartID": "1"}, {"security__keyRotationID": "2"}]
    for change in changes:
        demo.change(**change)
        for _ in range(30):
            demo.turn()
            there = set(secrets(demo))
            for kind in ("Deployment", "Pod"):
                for each in demo.cluster.of(kind):
                    found = (
                        each["spec"]["template"]["spec"] if kind == "Deployment" else each["spec"]
                    )
                    assert secrets_of(found) <= there, each["metadata"]["name"]
    assert set(secrets(demo)) == {"demo-canary", *(f"demo-{role}-keys-g2" for role in Role)}


def test_a_deleted_router_finds_its_secrets_after_an_upgrade(demo: Demo):
    """A Secret that only a Deployment mounts, and no pod at the moment, stays."""
    demo.turn(4)
    for each in demo.cluster.of("Pod"):
        if "tandem.dev/role" not in each["metadata"]["labels"]:
            continue
        demo.cluster.delete("Pod", KEY[0], each["metadata"]["name"])
    demo.turn(4)
    for each in demo.cluster.of("Deployment"):
        assert secrets_of(each["spec"]["template"]["spec"]) <= set(secrets(demo))


def test_a_service_made_by_this_release_has_digits_in_the_names_of_its_secrets():
    """One that is deleted and made again meets no Secret of its former life."""
    fresh = Demo()
    fresh.turn(4)
    assert "demo-canary" not in secrets(fresh)
    assert len(secrets(fresh)) == 4
    fresh.close()


def roll(demo: Demo, **changes: Any) -> dict[str, set[str]]:
    """Change the spec, wait until it is rolled out, and return the revisions of each role."""
    demo.change(**changes)
    demo.turn(40)
    assert demo.condition("Progressing")[1] == "Stable", demo.condition("Progressing")
    return {str(role): set(demo.replicas(role)) for role in Role}


def test_the_first_change_after_an_upgrade_rolls_whole_pairs(demo: Demo):
    """Only the router's spec changes, and its new pods speak another wire: workers roll, too; the
    next change rolls one role alone."""
    demo.turn(4)
    before = {str(role): set(demo.replicas(role)) for role in Role}
    first = roll(demo, router__queue={"maxAgeSeconds": 9})
    assert all(not before[role] & first[role] for role in before)
    second = roll(demo, router__queue={"maxAgeSeconds": 8})
    assert second["prefill"] == first["prefill"]
    assert second["decode"] == first["decode"]
    assert not second["router"] & first["router"]


def test_a_change_that_is_taken_back_at_once_leaves_what_was_there(demo: Demo):
    """The workers that would have rolled with the router stay with it."""
    demo.turn(4)
    before = replicas(demo)
    demo.change(router__queue={"maxAgeSeconds": 9})
    demo.turn(1)
    assert replicas(demo) != before
    demo.change()
    demo.turn(20)
    assert replicas(demo) == before


def test_workers_of_an_image_of_their_own_do_not_roll_with_the_router():
    """Pods made anew of the same image would speak what they speak now."""
    made = facts(image="mine:1")
    templates: dict[RevisionKey, Manifest] = {
        (role, made.revision(role)): {"metadata": {}} for role in WORKERS
    }
    assert moved_roles(made, templates) == frozenset()
    usual = facts()
    templates = {(role, usual.revision(role)): {"metadata": {}} for role in WORKERS}
    assert moved_roles(usual, templates) == frozenset(WORKERS)


def test_new_pods_say_their_wire_and_that_they_may_be_evicted():
    """Routers are spread over nodes besides; the model's Job is not to be begun again."""
    made = facts()
    for role in Role:
        template = rendered(made, role)
        assert template["metadata"]["annotations"][ANNOTATION_WIRE] == WIRE
        assert template["metadata"]["annotations"][SAFE_TO_EVICT] == "true"
        spread = template["spec"].get("topologySpreadConstraints", [])
        assert [each["topologyKey"] for each in spread] == (
            ["kubernetes.io/hostname"] if role is Role.ROUTER else []
        )
        for each in spread:
            chosen = each["labelSelector"]["matchLabels"].items()
            assert chosen <= template["metadata"]["labels"].items()
    job = model_job(made)
    assert job is not None
    assert job["spec"]["template"]["metadata"]["annotations"][SAFE_TO_EVICT] == "false"


def test_an_older_crd_gets_a_status_without_what_it_lacks(demo: Demo):
    """The API server refuses fields by name: the rest is written, and said where people look."""
    real = demo.cluster.apply
    lacks = ("progressedAt", "ready")

    def apply(manifest: dict[str, Any], *, subresource: str = "", dry_run: bool = False) -> Any:
        said = [
            f".status.rollout.{name}: field not declared in schema"
            for name in lacks
            if subresource and name in manifest["status"].get("rollout", {})
        ]
        if said:
            raise ClusterError(
                500, "InternalError", "failed to create typed: errors:\n" + "\n".join(said)
            )
        return real(manifest, subresource=subresource, dry_run=dry_run)

    demo.cluster.apply = apply  # type: ignore[method-assign]
    demo.turn(4)
    assert demo.failure is None
    assert not demo.status()["rollout"].keys() & set(lacks)
    assert demo.condition("Ready")[0] == "True"
    assert (
        "lacks status.rollout.progressedAt, status.rollout.ready" in demo.condition("Accepted")[2]
    )
    told = [each for each in demo.cluster.events if each["reason"] == "CustomResourceOutdated"]
    assert len(told) == 1


def test_a_path_of_an_undeclared_field_goes_through_lists():
    """The API server names an item of a list by its key or its number."""
    numbers: list[int] = []
    undeclared = Undeclared(numbers.append)
    cluster = Demo().cluster
    status = {"scalers": [{"role": "prefill", "replicas": 1}], "links": {"down": [], "total": 1}}
    said = (
        '.status.scalers[role="prefill"].replicas: field not declared in schema\n'
        ".status.links.down: field not declared in schema"
    )

    def apply(manifest: dict[str, Any], **_: Any) -> Any:
        if "replicas" in manifest["status"]["scalers"][0]:
            raise ClusterError(500, "InternalError", said)
        return manifest

    cluster.apply = apply  # type: ignore[method-assign]
    made = undeclared.apply(cluster, {"kind": "LLMService", "status": status})
    assert made["status"] == {"scalers": [{"role": "prefill"}], "links": {"total": 1}}
    assert numbers == [2]


def test_a_deleted_scaler_begins_with_the_last_count():
    """Neither the role nor the scaler that is made anew falls back to the seed."""
    scaling = {"mode": "External", "minReplicas": 1, "maxReplicas": 9}
    demo = Demo(decode={"replicas": 1, "scaling": scaling})
    demo.turn(12)
    scaler = demo.cluster.objects[("LLMRoleScaler", "demo-decode")]
    demo.cluster.put("LLMRoleScaler", {**scaler, "spec": {**scaler["spec"], "replicas": 6}})
    demo.turn(4)
    assert list(demo.replicas("decode").values()) == [6]
    demo.cluster.delete("LLMRoleScaler", KEY[0], "demo-decode")
    demo.turn(1)
    assert list(demo.replicas("decode").values()) == [6]
    assert demo.cluster.objects[("LLMRoleScaler", "demo-decode")]["spec"]["replicas"] == 6
    demo.close()


def test_templates_of_another_form_are_written_as_go_writes_them(demo: Demo):
    """Else the garbage collector cannot take their owner away: `kubectl delete --cascade=orphan`
    never ends."""
    for each in demo.cluster.of("ControllerRevision"):
        turned = dict(reversed(each["data"]["template"].items()))
        demo.cluster.put("ControllerRevision", {**each, "data": {"template": turned}})
    before = {
        each["metadata"]["name"]: each["data"] for each in demo.cluster.of("ControllerRevision")
    }
    demo.turn(3)
    after = {
        each["metadata"]["name"]: each["data"] for each in demo.cluster.of("ControllerRevision")
    }
    assert after == before
    assert all(map(is_sorted, after.values()))
    demo.cluster.writes.clear()
    demo.turn(2)
    assert not [each for each in demo.cluster.writes if each[1] == "ControllerRevision"]


def test_what_go_escapes_is_escaped():
    made = as_go_writes(
        {"kind": "ControllerRevision", "data": {"b": "<&>", "a": [{"z": 1, "c": "é"}]}}
    )
    assert msgspec.json.encode(made["data"]) == (
        b'{"a":[{"c":"\xc3\xa9","z":1}],"b":"\\u003c\\u0026\\u003e"}'
    )


def test_a_secret_of_another_name_stays_while_a_deployment_mounts_it():
    """Its routers are asked with the token that they have, whatever the Secret is called now."""
    fresh = Demo()
    fresh.turn(12)
    own = next(each for each in fresh.cluster.of("Secret") if "canary" in each["metadata"]["name"])
    metadata = {
        "name": "demo-canary",
        "labels": own["metadata"]["labels"],
        "ownerReferences": own["metadata"]["ownerReferences"],
    }
    fresh.cluster.put("Secret", {"metadata": metadata, "stringData": {"token": "older-token"}})
    name = own["metadata"]["name"]
    for kind in ("ControllerRevision", "Deployment"):
        for each in fresh.cluster.of(kind):
            text = json.dumps(each).replace(f'"{name}"', '"demo-canary"')
            fresh.cluster.put(kind, json.loads(text))
    fresh.probes.questions.clear()
    fresh.turn(4)
    assert {"demo-canary", name} <= set(secrets(fresh))
    assert {question.token for question in fresh.probes.questions} == {"older-token"}
    fresh.close()
