"""Names that somebody else has: untouched, whatever the kind, and told by name.

On a real API server, with objects as a person or another controller would have made them.
"""

from __future__ import annotations

import time

import pytest
from tests.operator.foreign import foreign_objects
from tests.operator.harness import Harness
from tests.operator.test_children import facts

from tandem.operator.cluster.apply import taken
from tandem.operator.cluster.store import CHILDREN
from tandem.operator.desired.compose import desired
from tandem.operator.desired.naming import Manifest
from tandem.operator.reconcile.reconciler import SOON

pytestmark = pytest.mark.full

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
    name = FOREIGN[kind]["metadata"]["name"]
    metadata = {"name": name, "labels": OURS if labelled else {}}
    harness.make({**FOREIGN[kind], "metadata": metadata})
    before = harness.cluster.get(kind, harness.namespace, name)
    assert before is not None
    harness.create(decode__scaling={"mode": "External"})
    harness.wait(lambda: harness.condition("Accepted")[:2] == ("False", "NameTaken"), text=kind)
    assert f"{kind} {name} " in harness.condition("Accepted")[2]
    assert harness.condition("Ready")[1] == "NameTaken"
    assert harness.names("Deployment") <= {name}, "pods were started"
    harness.cluster.delete("LLMService", harness.namespace, "demo")
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
    """A Secret in the place of a coming key stops the rotation for as long as it is there, says
    so, and stays as it is."""
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
    time.sleep(2 * SOON)  # looks that could take another name for the key, or forget the refusal
    assert harness.condition("Accepted")[:2] == ("False", "NameTaken")
    assert not harness.names("Secret") & {coming.replace("-g2", "-g3")}
    harness.kubectl("delete", "secret", coming)
    harness.wait(lambda: harness.condition("Accepted")[0] == "True")
    assert coming in harness.names("Secret")


def test_what_the_collector_is_about_to_remove_is_nobodys_mistake():
    """Of an earlier service of the same name the message says to wait."""
    (manifest,) = [each for each in desired(facts(), {}, {}).applied if each["kind"] == "Role"]
    (owner,) = manifest["metadata"]["ownerReferences"]
    earlier = {**manifest["metadata"], "ownerReferences": [{**owner, "uid": "earlier"}]}
    found = taken({**manifest, "metadata": earlier}, manifest)
    assert found.passes
    assert "an earlier LLMService demo" in found.message()
