"""Store of services and their children from watches, lists and our own writes: the input of looks.

The newest version of an object wins, from any source, so that a late event never hides our own
write; versions of an API server can be compared as numbers (KEP-5504). A deleted object stays
deleted: UIDs are remembered for a while. Objects are stored as JSON, slimmed: a tenth of their size
as dictionaries, and no reader can change them. Filled by ``watch``, ``resync`` and ``mirror``; read
by ``gather``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from tandem.operator.desired.naming import Manifest
from tandem.protocol.names import CANARY_TOKEN_FILE, LABEL_SERVICE

_WRITTEN_BY_OTHERS = ("Job", "LLMRoleScaler", "LLMService", "Pod", "ControllerRevision", "Secret")
"""Kinds whose managers of fields are never read."""
_POD_STATUS = ("phase", "podIP", "conditions", "containerStatuses", "initContainerStatuses")


def slim(kind: str, item: Manifest) -> Manifest:
    """Return the object without fields that no look reads, and with its kind, which lists omit."""
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
"""Namespace and name of a service."""
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
"""Kinds of children, all found by one label."""
KINDS = (SERVICE, *CHILDREN)
_GONE = 20_000
"""Number of remembered UIDs of deleted objects; an event is late by seconds, not by so many."""


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
        """Kind and name of every child, by service."""
        self._gone: OrderedDict[str, int] = OrderedDict()
        """Version at which an object was gone, by UID."""
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
        """Remove the object of this UID, which is gone by ``version`` or has lost our label; return
        its service if that is new."""
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
        """Store a whole list (of a namespace, or of the cluster), made at ``version``; return the
        services of objects whose change was not known."""
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
        """Return one object, or None."""
        with self._lock:
            entry = self._objects[kind].get((namespace, name))
        return None if entry is None else msgspec.json.decode(entry.data)

    def children(self, service: Key) -> list[Manifest]:
        """Return all objects with the service's label in its namespace."""
        with self._lock:
            found = [
                self._objects[kind][(service[0], name)].data
                for kind, name in self._children.get(service, ())
            ]
        return [msgspec.json.decode(data) for data in found]

    def all(self, kind: str) -> list[Manifest]:
        """Return the objects of a kind, of all services."""
        with self._lock:
            found = [entry.data for entry in self._objects[kind].values()]
        return [msgspec.json.decode(data) for data in found]

    def count(self, kind: str) -> int:
        """Return the number of objects of a kind, of all services."""
        with self._lock:
            return len(self._objects[kind])

    def known(self, kind: str, place: Key) -> tuple[str, str] | None:
        """Return UID and version of a stored object."""
        with self._lock:
            entry = self._objects.get(kind, {}).get(place)
        return None if entry is None else (entry.uid, str(entry.version))

    def size(self) -> int:
        """Return the number of objects."""
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
    """Return the service that an object is, or that its label names."""
    metadata = item["metadata"]
    if kind == SERVICE:
        return metadata["namespace"], metadata["name"]
    name = (metadata.get("labels") or {}).get(LABEL_SERVICE)
    return (metadata["namespace"], name) if name and "namespace" in metadata else None


def _number(version: str) -> int:
    return int(version)
