"""Writes of children: apply, create, prune.

An object is applied unless its live version and wanted content are those of the last apply.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.operator.api.values import digest
from tandem.operator.cluster.client import (
    REFUSALS,
    Cluster,
    ClusterError,
    Refused,
    refused,
)
from tandem.operator.cluster.undeclared import is_tampered, untampered
from tandem.operator.decide.observe import Snapshot
from tandem.operator.desired.naming import MANAGER, Identity, Manifest
from tandem.operator.desired.revision import in_order, is_sorted

KIND = "LLMService"


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A name that a child requires and that an object of another owner has."""

    kind: str
    name: str
    owner: str
    """Owner of the object, for a condition."""
    passes: bool
    """Whether the garbage collector is about to remove it."""

    def message(self) -> str:
        """Return the problem and its remedy, for a condition."""
        text = f"{self.kind} {self.name} is there already and belongs to {self.owner}"
        if self.passes:
            return f"{text}; waiting until it is collected"
        return f"{text}; it stays unchanged: remove it, or rename the LLMService"


def controller_of(item: Manifest) -> Manifest | None:
    """Return the owner reference that controls an object, or None."""
    owners = item["metadata"].get("ownerReferences") or ()
    found: Manifest | None = next((each for each in owners if each.get("controller")), None)
    return found


def is_owned(item: Manifest, uid: str) -> bool:
    """Return whether the LLMService of this UID controls an object."""
    owner = controller_of(item)
    return owner is not None and (owner["kind"], owner["uid"]) == (KIND, uid)


def owner_uid(manifest: Manifest) -> str:
    """Return the UID of the LLMService that controls a child."""
    owner = controller_of(manifest)
    assert owner is not None, manifest["metadata"]["name"]
    uid: str = owner["uid"]
    return uid


def is_ours(item: Manifest, owner: Identity) -> bool:
    """Return whether an object belongs to a service; pods belong to it through their owner.

    A pod's ReplicaSet or Job is recognized by its name.
    """
    if item["kind"] != "Pod":
        return is_owned(item, owner.uid)
    maker = controller_of(item)
    return (
        maker is not None
        and maker["kind"] in ("ReplicaSet", "Job")
        and maker["name"].startswith(f"{owner.name}-")
    )


def taken(item: Manifest, manifest: Manifest) -> Taken:
    """Return the conflict with ``item``, which has the name of ``manifest``."""
    metadata, ours = item["metadata"], controller_of(manifest)
    owner = controller_of(item)
    earlier = (
        ours is not None
        and owner is not None
        and (owner["kind"], owner["name"]) == (KIND, ours["name"])
    )
    return Taken(
        kind=manifest["kind"],
        name=metadata["name"],
        owner=_owner_text(item, earlier=earlier),
        passes=earlier or "deletionTimestamp" in metadata,
    )


def _owner_text(item: Manifest, *, earlier: bool) -> str:
    owner = controller_of(item)
    if owner is not None and earlier:
        return f"an earlier LLMService {owner['name']} (uid {owner['uid']})"
    if owner is not None:
        return f"{owner['kind']} {owner['name']}"
    writers = [each.get("manager", "") for each in item["metadata"].get("managedFields") or ()]
    written = next((f" (written by {name})" for name in writers if name), "")
    return f"no LLMService{written}"


def held_by_apply(item: Manifest) -> list[Manifest] | None:
    """Return managedFields with the operator's writes as one apply; None if they are."""
    entries: list[Manifest] = item["metadata"].get("managedFields") or []
    written = [each for each in entries if _is_ours(each) and each["operation"] == "Update"]
    if not written:
        return None
    ours = [each for each in entries if _is_ours(each)]
    fields: Manifest = {}
    for each in ours:
        fields = _union(fields, each.get("fieldsV1") or {})
    one = {**ours[0], "operation": "Apply", "fieldsV1": fields}
    return [one, *(each for each in entries if not _is_ours(each))]


def _is_ours(entry: Manifest) -> bool:
    return entry.get("manager") == MANAGER and not entry.get("subresource")


def _union(one: Any, other: Any) -> Any:
    result = copy.deepcopy(one)
    for key, value in other.items():
        result[key] = _union(result[key], value) if key in result else copy.deepcopy(value)
    return result


_CHANGED = (404, 409)
"""Statuses for an object that has changed since it was read."""
_REMEMBERED = 50_000
"""Maximum objects whose apply is remembered."""
PRUNED = ("ControllerRevision", "Deployment", "Job", "LLMRoleScaler", "NetworkPolicy", "Secret")
"""Kinds of children that can become superfluous."""
Problem = Taken | Refused


class Applier:
    """Writer of children that remembers what it wrote. Thread-safe.

    An absent object is made by a POST, which fails if the name is taken. An existing one is written
    under its UID. So an object of another owner is never written.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._written: dict[tuple[str, str], tuple[str, str]] = {}

    def apply(self, wanted: Iterable[Manifest], live: Snapshot) -> list[Problem]:
        """Apply the children that differ, and return the problems.

        Names with another owner are skipped. Raises ClusterError if the API server is not reached.
        """
        return [each for one in wanted if (each := self._apply_one(one, live)) is not None]

    def _apply_one(self, manifest: Manifest, live: Snapshot) -> Problem | None:
        try:
            return self._try_thrice(manifest, live)
        except ClusterError as error:
            return refused(_named(manifest), error)

    def _try_thrice(self, manifest: Manifest, live: Snapshot) -> Taken | None:
        kind, metadata = manifest["kind"], manifest["metadata"]
        there = live.find(kind, metadata["name"])
        for last in (False, False, True):
            try:
                return self._try(manifest, there)
            except ClusterError as error:
                if error.status not in _CHANGED or last:
                    raise
            there = self._cluster.get(kind, metadata["namespace"], metadata["name"])
        raise AssertionError("the last try returns or raises")

    def _try(self, manifest: Manifest, there: Manifest | None) -> Taken | None:
        """Write once; 404 or 409 if the object has changed since it was read."""
        content = digest(manifest)
        if there is None:
            self._remember(self._made(manifest), content)
            return None
        if not is_owned(there, owner_uid(manifest)):
            return taken(there, manifest)
        uid, version = there["metadata"]["uid"], there["metadata"]["resourceVersion"]
        if self._written.get((manifest["kind"], uid)) == (version, content):
            return None
        if is_tampered(there):  # first: a policy may refuse a tampered object, also to us
            there = self._cluster.replace(untampered(manifest, there))
        shared = is_tampered(there)  # another manager owns correct fields, too
        held = held_by_apply(there)
        if held is not None:
            self._cluster.write_fields(there, held)
        known = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        result = self._cluster.apply(known)
        if is_tampered(result) and not shared:  # tampered since it was read: the event will be old
            raise ClusterError(
                409, "Conflict", f"{manifest['kind']} {result['metadata']['name']} was edited"
            )
        self._remember(result, content)
        return None

    def _made(self, manifest: Manifest) -> Manifest:
        made = self._cluster.create(manifest)
        if made is None:
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            raise ClusterError(409, "AlreadyExists", f"{kind} {name}")
        return {"kind": manifest["kind"], **made}

    def _remember(self, result: Manifest, content: str) -> None:
        if len(self._written) > _REMEMBERED:
            self._written.clear()
        metadata = result["metadata"]
        self._written[(result["kind"], metadata["uid"])] = (metadata["resourceVersion"], content)

    def create(self, wanted: Iterable[Manifest], live: Snapshot) -> list[Problem]:
        """Make absent objects, without later writes. Raises ClusterError as ``apply``."""
        found = [self.ensure(each, live) for each in wanted]
        return [each for each in found if not isinstance(each, dict)]

    def ensure(self, manifest: Manifest, live: Snapshot) -> Manifest | Problem:
        """Return our object of this name, made now if it is absent."""
        try:
            return self._ensured(manifest, live)
        except ClusterError as error:
            return refused(_named(manifest), error)

    def _ensured(self, manifest: Manifest, live: Snapshot) -> Manifest | Taken:
        kind, metadata = manifest["kind"], manifest["metadata"]
        there = live.find(kind, metadata["name"]) or self._cluster.create(manifest)
        there = there or self._cluster.get(kind, metadata["namespace"], metadata["name"])
        if there is None:
            raise ClusterError(409, "Conflict", f"{kind} {metadata['name']} was deleted meanwhile")
        return there if is_owned(there, owner_uid(manifest)) else taken(there, manifest)

    def rewrite(self, live: Snapshot, owner_uid: str) -> list[Problem]:
        """Rewrite ControllerRevisions of earlier releases in Go's form.

        The garbage collector cannot remove their owner reference otherwise.
        """
        found: list[Problem] = []
        for item in list(live.of("ControllerRevision")):
            if is_sorted(item.get("data")) or not is_owned(item, owner_uid):
                continue
            metadata = item["metadata"]
            fresh = {
                "apiVersion": "apps/v1",
                "kind": item["kind"],
                "revision": item["revision"],
                "data": in_order(item["data"]),
                "metadata": {
                    key: metadata[key]
                    for key in ("name", "namespace", "labels", "annotations", "ownerReferences")
                    if key in metadata
                },
            }
            where = metadata["namespace"], metadata["name"]
            try:
                self._cluster.delete("ControllerRevision", *where, uid=metadata["uid"])
                self._cluster.create(fresh)
            except ClusterError as error:
                found.append(refused(_named(item), error))
        return found

    def strangers(self, wanted: Iterable[Manifest], live: Snapshot) -> list[Taken]:
        """Return the names of ``wanted`` with another owner. Raises ClusterError."""
        absent = [
            each for each in wanted if live.find(each["kind"], each["metadata"]["name"]) is None
        ]
        return [found for each in absent if (found := self._stranger(each)) is not None]

    def _stranger(self, manifest: Manifest) -> Taken | None:
        metadata = manifest["metadata"]
        there = self._cluster.get(manifest["kind"], metadata["namespace"], metadata["name"])
        if there is None or is_owned(there, owner_uid(manifest)):
            return None
        return taken(there, manifest)

    def prune(self, live: Snapshot, keep: set[tuple[str, str]], owner_uid: str) -> list[Problem]:
        """Delete children of prunable kinds that are not in ``keep``."""
        found: list[Problem] = []
        for kind in PRUNED:
            for item in live.of(kind):
                metadata = item["metadata"]
                if is_owned(item, owner_uid) and (kind, metadata["name"]) not in keep:
                    where = metadata["namespace"], metadata["name"]
                    try:
                        self._cluster.delete(kind, *where, uid=metadata["uid"])
                    except ClusterError as error:
                        found.append(refused(f"{kind} {metadata['name']}", error))
        return found

    def refusal(self, manifest: Manifest) -> str | None:
        """Return the API server's refusal of an object in a dry run, or None."""
        try:  # an apply answers 500 to an unknown field
            self._cluster.create(manifest, dry_run=True)
        except ClusterError as error:
            if error.status in REFUSALS:
                return error.message
            raise
        return None

    def refusal_of_pods(self, manifest: Manifest) -> str | None:
        """Return the API server's refusal of a workload's pods in addition to all others, or
        None.
        """
        template = manifest["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "generateName": manifest["metadata"]["name"] + "-",
                "namespace": manifest["metadata"]["namespace"],
            },
            "spec": template["spec"],
        }
        return self.refusal(pod)


def _named(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"
