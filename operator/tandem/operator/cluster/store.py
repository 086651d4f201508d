"""Services and their children as watches, lists and our own writes told them: what looks read.

The newest version of an object wins, whoever brings it, so that a late event never hides what we
wrote; versions of an API server can be compared as numbers (KEP-5504). What is gone stays gone:
UIDs are remembered for a while. Objects lie here as JSON, slimmed: a tenth of what they take as
dictionaries, and nobody can change another's. Filled by ``watch``, ``resync`` and ``mirror``; read
by ``gather``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from tandem.operator.cluster.slim import slim
from tandem.operator.desired.naming import Manifest
from tandem.protocol.names import LABEL_SERVICE

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
"""UIDs of deleted objects that are remembered; an event is late by seconds, not by so many."""


class _Entry(msgspec.Struct, frozen=True):
    uid: str
    version: int
    service: Key
    data: bytes


class Store:
    """Thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[Key, _Entry]] = {kind: {} for kind in KINDS}
        self._children: dict[Key, set[tuple[str, str]]] = {}
        """Kind and name of every child, by service."""
        self._gone: OrderedDict[str, int] = OrderedDict()
        """At which version an object was gone, by UID."""
        self._lock = threading.Lock()

    def put(self, kind: str, item: Manifest) -> Key | None:
        """Take an object in; its service when that is news."""
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
        """The object of this UID is gone by ``version``, or is ours no more by its label; its
        service when that is news."""
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
        """Take in a whole list (of a namespace, or of the cluster), made at ``version``; services
        of what had changed unheard."""
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
        """One object, or None."""
        with self._lock:
            entry = self._objects[kind].get((namespace, name))
        return None if entry is None else msgspec.json.decode(entry.data)

    def children(self, service: Key) -> list[Manifest]:
        """All that carries the service's label in its namespace."""
        with self._lock:
            found = [
                self._objects[kind][(service[0], name)].data
                for kind, name in self._children.get(service, ())
            ]
        return [msgspec.json.decode(data) for data in found]

    def all(self, kind: str) -> list[Manifest]:
        """Objects of a kind, of all services."""
        with self._lock:
            found = [entry.data for entry in self._objects[kind].values()]
        return [msgspec.json.decode(data) for data in found]

    def count(self, kind: str) -> int:
        """How many objects of a kind there are, of all services."""
        with self._lock:
            return len(self._objects[kind])

    def known(self, kind: str, place: Key) -> tuple[str, str] | None:
        """UID and version of an object as it lies here."""
        with self._lock:
            entry = self._objects.get(kind, {}).get(place)
        return None if entry is None else (entry.uid, str(entry.version))

    def size(self) -> int:
        """Objects."""
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
    """The service that an object is, or that its label names."""
    metadata = item["metadata"]
    if kind == SERVICE:
        return metadata["namespace"], metadata["name"]
    name = (metadata.get("labels") or {}).get(LABEL_SERVICE)
    return (metadata["namespace"], name) if name and "namespace" in metadata else None


def _number(version: str) -> int:
    return int(version)
