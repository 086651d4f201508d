"""What the applier writes and what it leaves alone, on a real API server without an operator.

An operator would put right what these tests do to children of a service.
"""

from __future__ import annotations

import json

import pytest
from tests.operator.control_plane import ControlPlane
from tests.operator.harness import Harness
from tests.operator.test_children import facts

from tandem.operator.cluster import Cluster
from tandem.operator.cluster.apply import Applier, Taken, is_owned
from tandem.operator.decide.observe import Snapshot
from tandem.operator.desired.compose import desired
from tandem.operator.desired.naming import Manifest, Role

pytestmark = pytest.mark.full


@pytest.fixture
def alone(plane: ControlPlane, cluster: Cluster, namespace: str) -> Harness:
    return Harness(plane, cluster, namespace)


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
    cluster: Cluster, alone: Harness, kind: str
):
    """A name that was free, or ours, when it was looked at may be another's when it is written."""
    alone.create()
    uid = alone.service()["metadata"]["uid"]
    manifest = children(alone.namespace, uid)[kind]
    name = manifest["metadata"]["name"]
    assert Applier(cluster).apply([manifest], Snapshot({})) == []
    ours = cluster.get(kind, alone.namespace, name)
    assert ours is not None
    assert is_owned(ours, uid)
    cluster.delete(kind, alone.namespace, name)
    alone.wait_for(lambda: cluster.get(kind, alone.namespace, name) is None)
    theirs = {**manifest, "metadata": {"name": name, "namespace": alone.namespace}}
    before = cluster.create(theirs)
    assert before is not None
    for seen in (Snapshot({}), Snapshot({kind: {name: ours}})):
        (found,) = Applier(cluster).apply([manifest], seen)
        assert isinstance(found, Taken)
        assert (found.kind, found.name, found.passes) == (kind, name, False)
    Applier(cluster).prune(Snapshot({kind: {name: ours}}), set(), uid)
    after = cluster.get(kind, alone.namespace, name)
    assert after is not None, "it was deleted"
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert "ownerReferences" not in after["metadata"]
    assert "Apply" not in {each["operation"] for each in after["metadata"]["managedFields"]}


def test_what_was_made_by_a_post_is_applied_from_then_on(cluster: Cluster, alone: Harness):
    """A retired key leaves the ConfigMap though it was in it when that was made."""
    alone.create()
    uid = alone.service()["metadata"]["uid"]
    manifest, applier = children(alone.namespace, uid)["ConfigMap"], Applier(cluster)
    applier.apply([{**manifest, "data": {"a": "1", "b": "1"}}], Snapshot({}))
    there = cluster.get("ConfigMap", alone.namespace, "demo-peers")
    assert there is not None
    seen = Snapshot({"ConfigMap": {"demo-peers": there}})
    applier.apply([{**manifest, "data": {"a": "2"}}], seen)
    after = cluster.get("ConfigMap", alone.namespace, "demo-peers")
    assert after is not None
    assert after["data"] == {"a": "2"}
    (entry,) = after["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("tandem-operator", "Apply")


def test_an_edit_between_look_and_write_is_put_right(plane: ControlPlane, alone: Harness):
    """The answer to our write is newer than the edit's event, which then wakes nobody: what others
    added meanwhile is seen in the answer."""

    class Late(Cluster):
        edits = 0

        def apply(
            self, manifest: Manifest, *, subresource: str = "", dry_run: bool = False
        ) -> Manifest:
            if self.edits:
                self.edits -= 1
                alone.kubectl("patch", "cm", "demo-peers", "-p", '{"data": {"stranger": "x"}}')
            return super().apply(manifest, subresource=subresource, dry_run=dry_run)

    cluster = Late(kubeconfig=plane.kubeconfig())
    alone.create()
    uid = alone.service()["metadata"]["uid"]
    manifest, applier = children(alone.namespace, uid)["ConfigMap"], Applier(cluster)
    applier.apply([{**manifest, "data": {"a": "1"}}], Snapshot({}))
    there = cluster.get("ConfigMap", alone.namespace, "demo-peers")
    assert there is not None
    cluster.edits = 1
    applier.apply(
        [{**manifest, "data": {"a": "2"}}], Snapshot({"ConfigMap": {"demo-peers": there}})
    )
    after = cluster.get("ConfigMap", alone.namespace, "demo-peers")
    assert after is not None
    assert after["data"] == {"a": "2"}


def test_a_field_that_another_applies_with_our_value_is_shared(cluster: Cluster, alone: Harness):
    """It is as it shall be, and no edit to be put right."""
    alone.create()
    uid = alone.service()["metadata"]["uid"]
    manifest, applier = children(alone.namespace, uid)["ConfigMap"], Applier(cluster)
    wanted = {**manifest, "data": {"a": "1"}}
    applier.apply([wanted], Snapshot({}))
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "1"}}
    theirs["metadata"] = {"name": "demo-peers"}
    alone.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(theirs))
    there = cluster.get("ConfigMap", alone.namespace, "demo-peers")
    assert there is not None
    assert applier.apply([wanted], Snapshot({"ConfigMap": {"demo-peers": there}})) == []
    after = cluster.get("ConfigMap", alone.namespace, "demo-peers")
    assert after is not None
    managers = {each["manager"] for each in after["metadata"]["managedFields"]}
    assert managers == {"kubectl", "tandem-operator"}
