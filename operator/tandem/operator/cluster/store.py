"""Store of services and their children from watches, lists and our own writes.

The newest version of an object wins (KEP-5504). Deleted UIDs are remembered for a while. Objects
are stored as slim JSON. ``Mirror`` is a client that stores its answers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.operator.cluster.client import Cluster
from tandem.operator.desired.naming import Manifest
from tandem.protocol.names import CANARY_TOKEN_FILE, LABEL_SERVICE

_WRITTEN_BY_OTHERS = ("Job", "LLMRoleScaler", "LLMService", "Pod", "ControllerRevision", "Secret")
"""Kinds whose managers of fields are not read."""
_POD_STATUS = ("phase", "podIP", "conditions", "containerStatuses", "initContainerStatuses")


def slim(kind: str, item: Manifest) -> Manifest:
    """Return the object with its kind, and without fields that are not read."""
    kept = {**item, "kind": kind}
    if kind in _WRITTEN_BY_OTHERS:
        kept["metadata"] = {k: v for k, v in item["metadata"].items() if k != "managedFields"}
    if kind == "Pod":
        status = item.get("status") or {}
        spec = item.get("spec") or {}
        kept["spec"] = {"volumes": spec.get("volumes") or [], "nodeName": spec.get("nodeName")}
        kept["status"] = {key: status[key] for key in _POD_STATUS if key in status}
    elif kind == "Job":
        kept.pop("spec", None)
    elif kind == "Secret":
        data = item.get("data") or {}
        kept["data"] = {key: data[key] for key in (CANARY_TOKEN_FILE,) if key in data}
    return kept


Key = tuple[str, str]
SERVICE = "LLMService"
CHILDREN = (
    "ConfigMap",
    "ControllerRevision",
    "Deployment",
    "Job",
    "LLMRoleScaler",
    "NetworkPolicy",
    "Pod",
    "PodDisruptionBudget",
    "Role",
    "RoleBinding",
    "Secret",
    "Service",
    "ServiceAccount",
)
"""Kinds of children, found by one label."""
KINDS = (SERVICE, *CHILDREN)
_GONE = 20_000
"""Remembered UIDs of deleted objects."""


class _Entry(msgspec.Struct, frozen=True):
    uid: str
    version: int
    service: Key
    data: bytes


class Store:
    """Store of objects. Thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[Key, _Entry]] = {kind: {} for kind in KINDS}
        self._children: dict[Key, set[tuple[str, str]]] = {}
        """Kind and name of children, by service."""
        self._gone: OrderedDict[str, int] = OrderedDict()
        """Version at which an object was deleted, by UID."""
        self._lock = threading.Lock()

    def put(self, kind: str, item: Manifest) -> Key | None:
        """Store an object; return its service if the object is new or changed."""
        service = service_of(kind, item)
        if service is None or kind not in self._objects:
            return None
        metadata = item["metadata"]
        place = (metadata["namespace"], metadata["name"])
        entry = _Entry(
            uid=metadata["uid"],
            version=_number(metadata["resourceVersion"]),
            service=service,
            data=msgspec.json.encode(slim(kind, item)),
        )
        with self._lock:
            return service if self._put(kind, place, entry) else None

    def _put(self, kind: str, place: Key, entry: _Entry) -> bool:
        there = self._objects[kind].get(place)
        if there is not None and there.version >= entry.version:
            return False
        if entry.version <= self._gone.get(entry.uid, -1):
            return False
        if there is not None:
            self._forget(kind, place, there)
        self._objects[kind][place] = entry
        if kind != SERVICE:
            self._children.setdefault(entry.service, set()).add((kind, place[1]))
        return True

    def drop(self, kind: str, place: Key, uid: str, version: str) -> Key | None:
        """Remove a deleted object; return its service if that is new."""
        gone = _number(version)
        with self._lock:
            self._remember_gone(uid, gone)
            there = self._objects.get(kind, {}).get(place)
            if there is None or there.uid != uid or there.version > gone:
                return None
            self._forget(kind, place, there)
            return there.service

    def replace(
        self, kind: str, namespace: str | None, items: Iterable[Manifest], version: str
    ) -> set[Key]:
        """Store a list of a namespace or the cluster; return the services of unknown changes."""
        listed, changed = set(), set()
        for item in items:
            metadata = item["metadata"]
            listed.add((metadata["namespace"], metadata["name"]))
            changed.add(self.put(kind, item))
        with self._lock:
            lost = [
                (place, entry)
                for place, entry in self._objects[kind].items()
                if namespace in (None, place[0])
                and place not in listed
                and entry.version <= _number(version)
            ]
        changed |= {self.drop(kind, place, entry.uid, version) for place, entry in lost}
        return {each for each in changed if each is not None}

    def find(self, kind: str, namespace: str, name: str) -> Manifest | None:
        with self._lock:
            entry = self._objects[kind].get((namespace, name))
        return None if entry is None else msgspec.json.decode(entry.data)

    def children(self, service: Key) -> list[Manifest]:
        """Return all objects of the service."""
        with self._lock:
            found = [
                self._objects[kind][(service[0], name)].data
                for kind, name in self._children.get(service, ())
            ]
        return [msgspec.json.decode(data) for data in found]

    def all(self, kind: str) -> list[Manifest]:
        with self._lock:
            found = [entry.data for entry in self._objects[kind].values()]
        return [msgspec.json.decode(data) for data in found]

    def count(self, kind: str) -> int:
        with self._lock:
            return len(self._objects[kind])

    def known(self, kind: str, place: Key) -> tuple[str, str] | None:
        """Return UID and version of a stored object."""
        with self._lock:
            entry = self._objects.get(kind, {}).get(place)
        return None if entry is None else (entry.uid, str(entry.version))

    def size(self) -> int:
        with self._lock:
            return sum(map(len, self._objects.values()))

    def _forget(self, kind: str, place: Key, entry: _Entry) -> None:
        del self._objects[kind][place]
        if kind == SERVICE:
            return
        left = self._children[entry.service]
        left.discard((kind, place[1]))
        if not left:
            del self._children[entry.service]

    def _remember_gone(self, uid: str, version: int) -> None:
        self._gone[uid] = max(version, self._gone.pop(uid, version))
        while len(self._gone) > _GONE:
            self._gone.popitem(last=False)


def service_of(kind: str, item: Manifest) -> Key | None:
    """Return the service that an object is or belongs to."""
    metadata = item["metadata"]
    if kind == SERVICE:
        return metadata["namespace"], metadata["name"]
    name = (metadata.get("labels") or {}).get(LABEL_SERVICE)
    return (metadata["namespace"], name) if name and "namespace" in metadata else None


def _number(version: str) -> int:
    return int(version)


class Mirror(Cluster):
    """Client that puts its answers into ``store`` at once, so that reads include the last write."""

    def __init__(self, store: Store, **given: Any) -> None:
        super().__init__(**given)
        self._store = store

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return one object, or None; the store is at least as new afterwards."""
        before = self._store.known(kind, (namespace, name))
        found = super().get(kind, namespace, name)
        if found is not None:
            self._store.put(kind, found)
        elif before is not None:
            self._store.drop(kind, (namespace, name), *before)
        return found

    def apply(
        self, manifest: Manifest, *, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        result = super().apply(manifest, subresource=subresource, dry_run=dry_run)
        return result if dry_run else self._stored(manifest["kind"], result)

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest | None:
        made = super().create(manifest, dry_run=dry_run)
        return made if dry_run or made is None else self._stored(manifest["kind"], made)

    def replace(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        result = super().replace(manifest, dry_run=dry_run)
        return result if dry_run else self._stored(manifest["kind"], result)

    def patch(self, kind: str, namespace: str, name: str, body: Manifest) -> Manifest | None:
        found = super().patch(kind, namespace, name, body)
        return None if found is None else self._stored(kind, found)

    def patch_pod_status(self, namespace: str, name: str, body: Manifest) -> Manifest | None:
        found = super().patch_pod_status(namespace, name, body)
        return None if found is None else self._stored("Pod", found)

    def write_fields(self, item: Manifest, entries: list[Manifest]) -> Manifest:
        return self._stored(item["kind"], super().write_fields(item, entries))

    def _stored(self, kind: str, item: Manifest) -> Manifest:
        self._store.put(kind, item)
        return item
