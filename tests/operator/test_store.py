"""What looks read: the newest version wins, what is gone stays gone, nothing grows without end."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.operator.cluster.store import Store
from tandem.protocol.names import CANARY_TOKEN_FILE, LABEL_SERVICE

KEY = ("ns", "demo")


def thing(name: str, version: int, *, uid: str = "", **more: Any) -> dict[str, Any]:
    """A child of the service ``demo``."""
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": uid or f"uid-{name}",
        "resourceVersion": str(version),
        "labels": {LABEL_SERVICE: "demo"},
    }
    return {"metadata": metadata, **more}


def names(store: Store) -> set[str]:
    return {each["metadata"]["name"] for each in store.children(KEY)}


def test_a_late_event_does_not_hide_our_own_write():
    """The answer of a write is newer than the event of what was there before it."""
    store = Store()
    assert store.put("ConfigMap", thing("a", 7, data={"x": "new"})) == KEY
    assert store.put("ConfigMap", thing("a", 5, data={"x": "old"})) is None
    assert store.put("ConfigMap", thing("a", 7, data={"x": "new"})) is None
    found = store.find("ConfigMap", "ns", "a")
    assert found is not None
    assert found["data"] == {"x": "new"}
    assert found["kind"] == "ConfigMap"


def test_what_is_gone_does_not_come_back_by_a_late_answer():
    """A deletion that was heard of outlives the answer of an earlier write; another object of the
    same name is news."""
    store = Store()
    store.put("Secret", thing("a", 5))
    assert store.drop("Secret", ("ns", "a"), "uid-a", "7") == KEY
    assert store.put("Secret", thing("a", 6)) is None
    assert names(store) == set()
    assert store.put("Secret", thing("a", 8, uid="another")) == KEY
    assert store.drop("Secret", ("ns", "a"), "uid-a", "7") is None
    assert names(store) == {"a"}


def test_what_lost_its_label_and_has_it_again_is_back():
    """For a watch by label that is a deletion; the same object may return later."""
    store = Store()
    store.put("Secret", thing("a", 5))
    assert store.drop("Secret", ("ns", "a"), "uid-a", "7") == KEY
    assert store.put("Secret", thing("a", 9)) == KEY
    assert store.drop("Secret", ("ns", "a"), "uid-a", "7") is None
    assert names(store) == {"a"}


def test_a_list_finds_what_watches_did_not_tell():
    """New, changed and lost objects; what was made after the list's moment stays."""
    store = Store()
    store.put("Pod", thing("lost", 3))
    store.put("Pod", thing("kept", 4))
    store.put("Pod", thing("younger", 30))
    changed = store.replace("Pod", None, [thing("kept", 4), thing("new", 9)], "20")
    assert changed == {KEY}
    assert names(store) == {"kept", "new", "younger"}
    assert store.replace("Pod", None, [thing("kept", 4), thing("new", 9)], "21") == set()


def test_a_list_of_one_namespace_says_nothing_of_others():
    """Namespaces are listed apart where they are watched apart."""
    store = Store()
    store.put("Pod", thing("a", 3))
    assert store.replace("Pod", "elsewhere", [], "20") == set()
    assert names(store) == {"a"}


def test_services_do_not_see_each_others_children():
    """Children are found by their label, within the namespace."""
    store = Store()
    other = thing("b", 4)
    other["metadata"]["labels"] = {LABEL_SERVICE: "other"}
    store.put("Pod", thing("a", 3))
    store.put("Pod", other)
    stranger = thing("c", 5)
    stranger["metadata"]["labels"] = {}
    assert store.put("Pod", stranger) is None
    assert names(store) == {"a"}
    assert {each["metadata"]["name"] for each in store.children(("ns", "other"))} == {"b"}


def test_private_keys_and_what_nobody_reads_are_not_kept():
    """A Secret's private key does not lie in memory; a pod's spec and histories do not, either."""
    store = Store()
    data = {"curve.secret": "c2VjcmV0", CANARY_TOKEN_FILE: "dG9rZW4="}
    store.put("Secret", thing("a", 3, data=data))
    pod = thing("p", 4, spec={"containers": [{"name": "main"}], "volumes": [{"name": "v"}]})
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    store.put("Pod", pod)
    text = msgspec.json.encode(store.children(KEY)).decode()
    assert "c2VjcmV0" not in text
    assert "dG9rZW4=" in text
    assert "containers" not in text
    assert "managedFields" not in text


def test_a_look_cannot_change_what_another_reads():
    """Every reader gets an object of its own."""
    store = Store()
    store.put("ConfigMap", thing("a", 3, data={"x": "y"}))
    first = store.find("ConfigMap", "ns", "a")
    assert first is not None
    first["data"]["x"] = "broken"
    second = store.find("ConfigMap", "ns", "a")
    assert second is not None
    assert second["data"] == {"x": "y"}
