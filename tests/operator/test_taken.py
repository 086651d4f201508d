"""Names that somebody else has: untouched, whatever the kind, and told by name.

On a real API server, with objects as a person or another controller would have made them.
"""

from __future__ import annotations

import json

import pytest
from tests.operator.foreign import foreign_objects
from tests.operator.harness import Harness
from tests.operator.test_children import facts

from tandem.operator.cluster import Cluster
from tandem.operator.cluster.apply import Applier
from tandem.operator.cluster.ownership import is_owned, taken
from tandem.operator.cluster.store import CHILDREN
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.desired.compose import desired
from tandem.operator.desired.naming import Manifest, Role

OURS = {"tandem.dev/service": "demo"}
FOREIGN = foreign_objects()
PLACES = {
    f"{kind} {'with' if labelled else 'without'} our labels": (kind, labelled)
    for kind in FOREIGN
    for labelled in (False, True)
}


def content(item: Manifest) -> Manifest:
    """An object without what its own controllers write."""
    kept = {key: value for key, value in item.items() if key not in ("status", "apiVersion")}
    metadata = item["metadata"]
    labels, owners = metadata.get("labels"), metadata.get("ownerReferences")
    return {**kept, "metadata": {"uid": metadata["uid"], "labels": labels, "owners": owners}}


def test_each_kind_of_child_is_tried():
    """A new kind of child gets its foreign object here."""
    assert set(FOREIGN) == set(CHILDREN) - {"Pod", "Secret"}


@pytest.mark.parametrize("place", PLACES)
def test_a_foreign_object_is_left_alone_and_named(harness: Harness, place: str):
    """Neither adopted, changed nor deleted, also under our labels; no pod starts beside it."""
    kind, labelled = PLACES[place]
    metadata = {**FOREIGN[kind]["metadata"], "labels": OURS if labelled else {}}
    name = metadata["name"]
    harness.kubectl("create", "-f", "-", stdin=json.dumps({**FOREIGN[kind], "metadata": metadata}))
    before = harness.cluster.get(kind, harness.namespace, name)
    assert before is not None
    harness.create(decode__scaling={"mode": "External"})
    harness.wait(lambda: harness.condition("Accepted")[:2] == ("False", "NameTaken"), text=kind)
    assert f"{kind} {name} " in harness.condition("Accepted")[2]
    assert harness.condition("Ready")[1] == "NameTaken"
    assert harness.names("Deployment") <= {name}, "pods were started"
    harness.kubectl("delete", "llm", "demo")
    harness.wait_for(lambda: "demo-worker" not in harness.names("ServiceAccount"))
    after = harness.cluster.get(kind, harness.namespace, name)
    assert after is not None, "it was deleted"
    assert content(after) == content(before)


def test_a_service_comes_up_when_the_name_is_free(harness: Harness):
    """Nothing needs to be done but to remove what is in the way."""
    harness.kubectl("create", "serviceaccount", "demo-router")
    harness.create()
    harness.wait(lambda: harness.condition("Accepted")[1] == "NameTaken")
    harness.kubectl("delete", "serviceaccount", "demo-router")
    harness.ready()


def test_a_foreign_key_is_told_while_the_service_goes_on(harness: Harness):
    """A Secret in the place of a coming key stops the rotation, says so, and stays as it is."""
    harness.create()
    harness.ready()
    before = harness.replicas()
    coming = harness.secret("demo-decode-keys-")["metadata"]["name"].replace("-g1", "-g2")
    harness.kubectl("create", "secret", "generic", coming, "--from-literal=a=b")
    harness.change({"spec": {"security": {"keyRotationID": "x"}}})
    harness.wait(lambda: harness.condition("Accepted")[:2] == ("False", "NameTaken"))
    assert f"Secret {coming} " in harness.condition("Accepted")[2]
    secret = harness.cluster.get("Secret", harness.namespace, coming)
    assert secret is not None
    assert set(secret["data"]) == {"a"}
    assert harness.replicas() == before
    assert harness.condition("Ready")[0] == "True"


def children(namespace: str, uid: str) -> dict[str, Manifest]:
    """One child of each kind that is applied, as the operator wants it."""
    given = facts()
    found = {}
    for each in desired(given, {(role, given.revision(role)): 1 for role in Role}, {}).applied:
        (owner,) = each["metadata"]["ownerReferences"]
        metadata = {
            **each["metadata"],
            "namespace": namespace,
            "ownerReferences": [{**owner, "uid": uid}],
        }
        found[each["kind"]] = {**each, "metadata": metadata}
    return found


@pytest.mark.parametrize("kind", sorted(children("x", "y")))
def test_an_object_that_comes_between_look_and_write_is_left_alone(
    cluster: Cluster, harness: Harness, kind: str
):
    """A name that was free, or ours, when it was looked at may be another's when it is written."""
    harness.create("other", suspend=True)
    uid = harness.service("other")["metadata"]["uid"]
    manifest = children(harness.namespace, uid)[kind]
    name = manifest["metadata"]["name"]
    assert Applier(cluster).apply([manifest], Snapshot({})) == []
    ours = cluster.get(kind, harness.namespace, name)
    assert ours is not None
    assert is_owned(ours, uid)
    cluster.delete(kind, harness.namespace, name)
    harness.wait_for(lambda: cluster.get(kind, harness.namespace, name) is None)
    theirs = {**manifest, "metadata": {"name": name, "namespace": harness.namespace}}
    before = cluster.create(theirs)
    assert before is not None
    for seen in (Snapshot({}), Snapshot({kind: {name: ours}})):
        (found,) = Applier(cluster).apply([manifest], seen)
        assert (found.kind, found.name, found.passes) == (kind, name, False)
    Applier(cluster).prune(Snapshot({kind: {name: ours}}), set(), uid)
    after = cluster.get(kind, harness.namespace, name)
    assert after is not None, "it was deleted"
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert "ownerReferences" not in after["metadata"]
    assert "Apply" not in {each["operation"] for each in after["metadata"]["managedFields"]}


def test_what_was_made_by_a_post_is_applied_from_then_on(cluster: Cluster, harness: Harness):
    """A retired key leaves the ConfigMap though it was in it when that was made."""
    harness.create("other", suspend=True)
    uid = harness.service("other")["metadata"]["uid"]
    manifest, applier = children(harness.namespace, uid)["ConfigMap"], Applier(cluster)
    applier.apply([{**manifest, "data": {"a": "1", "b": "1"}}], Snapshot({}))
    there = cluster.get("ConfigMap", harness.namespace, "demo-peers")
    assert there is not None
    seen = Snapshot({"ConfigMap": {"demo-peers": there}})
    applier.apply([{**manifest, "data": {"a": "2"}}], seen)
    after = cluster.get("ConfigMap", harness.namespace, "demo-peers")
    assert after is not None
    assert after["data"] == {"a": "2"}
    (entry,) = after["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("tandem-operator", "Apply")


def test_what_the_collector_is_about_to_remove_is_nobodys_mistake():
    """Of an earlier service of the same name the message says to wait."""
    (manifest,) = [each for each in desired(facts(), {}, {}).applied if each["kind"] == "Role"]
    (owner,) = manifest["metadata"]["ownerReferences"]
    earlier = {**manifest["metadata"], "ownerReferences": [{**owner, "uid": "earlier"}]}
    found = taken({**manifest, "metadata": earlier}, manifest)
    assert found.passes
    assert "an earlier LLMService demo" in found.message()
