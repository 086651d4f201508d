"""A cluster that is read and never written; called as ``Cluster``.

The API server tries each write as a dry run; the difference is kept as a change. It requires the
same rights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec

from tandem.operator.api.status import LLMServiceStatus
from tandem.operator.cluster.client import Cluster, ClusterError
from tandem.operator.desired.naming import Manifest

_BOOKKEEPING = frozenset(
    {"managedFields", "resourceVersion", "generation", "uid", "creationTimestamp"}
)
"""Metadata that every write changes."""
_LONGEST = 200


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Difference in one field; None for an absent field."""

    path: str
    before: str | None
    after: str | None


def differences(before: Manifest, after: Manifest) -> list[Difference]:
    """Return the fields that differ, in order, without status and bookkeeping.

    Lists of named items are compared by name, others as sequences.
    """
    return list(_walk("", _content(before), _content(after)))


def _content(item: Manifest) -> Manifest:
    metadata = {k: v for k, v in item.get("metadata", {}).items() if k not in _BOOKKEEPING}
    left_out = ("status", "apiVersion", "kind", "metadata")
    return {"metadata": metadata, **{k: v for k, v in item.items() if k not in left_out}}


def _walk(path: str, before: Any, after: Any) -> Iterator[Difference]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{path}.{key}" if path else key
            yield from _walk(inner, before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _walk_lists(path, before, after)
    else:
        yield Difference(path=path, before=_shown(before), after=_shown(after))


def _walk_lists(path: str, before: Sequence[Any], after: Sequence[Any]) -> Iterator[Difference]:
    olds, news = _by_name(before), _by_name(after)
    if olds is not None and news is not None:
        for name in sorted(olds.keys() | news.keys()):
            yield from _walk(f"{path}[{name}]", olds.get(name), news.get(name))
        return
    old, new = [_shown(each) or "" for each in before], [_shown(each) or "" for each in after]
    for kind, start, end, begin, stop in SequenceMatcher(None, old, new, False).get_opcodes():
        if kind != "equal":
            gone, come = " ".join(old[start:end]), " ".join(new[begin:stop])
            yield Difference(path=path, before=gone or None, after=come or None)


def _by_name(items: Sequence[Any]) -> dict[str, Any] | None:
    """Return the items by name; None without unique names."""
    named = {each["name"]: each for each in items if isinstance(each, dict) and "name" in each}
    return named if len(named) == len(items) else None


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


_SECRET = "its data is not shown"
_FORBIDDEN = 403


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Change of one object."""

    verb: str
    """create, update or delete."""
    kind: str
    name: str
    differences: list[Difference] = []
    """Differences of an update."""


class Stage(Cluster):
    """Cluster that keeps changes in order."""

    def __init__(self, *, kubeconfig: Path | None = None) -> None:
        super().__init__(pool=2, kubeconfig=kubeconfig)
        self.changes: list[Change] = []
        self.status: LLMServiceStatus | None = None
        """Status that would be written, if it differs."""
        self._made: dict[tuple[str, str], Manifest] = {}
        """Objects that would exist, by kind and name."""

    def made(self, kind: str, name: str) -> Manifest:
        """Return an object that would have been made."""
        return self._made[(kind, name)]

    def taken(self, manifest: Manifest) -> Manifest:
        """Return an object as the API server would have it, without counting a change."""
        return super().replace(manifest, dry_run=True)

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._made.get((kind, name)) or super().get(kind, namespace, name)

    def apply(self, manifest: Manifest, *, subresource: str = "", dry_run: bool = True) -> Manifest:
        """Keep the change of an apply. A service's status is kept whole."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        if subresource:
            if kind == "LLMService":
                self.status = msgspec.convert(manifest["status"], LLMServiceStatus)
            return manifest
        made = self._made.get((kind, metadata["name"]))
        if made is not None:  # already restored from an edit
            return made
        return self._kept(kind, metadata, super().apply(manifest, dry_run=True))

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest | None:
        """Keep a creation; None if the object exists."""
        kind, name = manifest["kind"], manifest["metadata"].get("name", "")
        if kind == "Event":
            return manifest
        try:
            made = super().create(manifest, dry_run=True)
        except ClusterError as error:
            if not (dry_run and self._waits_for_account(manifest, error)):
                raise
            made = manifest
        if made is None or dry_run:
            return made
        made["metadata"].setdefault("resourceVersion", "0")
        self._made[(kind, name)] = {"kind": kind, **made}
        self.changes.append(Change(verb="create", kind=kind, name=name))
        return made

    def _waits_for_account(self, manifest: Manifest, error: ClusterError) -> bool:
        """Return whether a pod is refused only because its account is yet to be made."""
        account = manifest.get("spec", {}).get("serviceAccountName", "")
        made = ("ServiceAccount", account) in self._made
        return manifest["kind"] == "Pod" and error.status == _FORBIDDEN and made

    def replace(self, manifest: Manifest, *, dry_run: bool = True) -> Manifest:
        result = super().replace(manifest, dry_run=True)
        kept = self._kept(manifest["kind"], manifest["metadata"], result)
        self._made[(manifest["kind"], manifest["metadata"]["name"])] = kept
        return kept

    def patch(self, kind: str, namespace: str, name: str, body: Manifest) -> Manifest | None:
        """Keep changed annotations, the only patches of the operator."""
        given = body["metadata"]["annotations"]
        marks = [
            Difference(path=f"metadata.annotations.{key}", before=None, after=value or "(none)")
            for key, value in sorted(given.items())
        ]
        self.changes.append(Change(verb="update", kind=kind, name=name, differences=marks))
        return super().get(kind, namespace, name)

    def patch_pod_status(self, namespace: str, name: str, body: Manifest) -> Manifest | None:
        """Do nothing: addresses are not rehearsed."""
        return super().get("Pod", namespace, name)

    def write_fields(self, item: Manifest, entries: list[Manifest]) -> Manifest:
        """Do nothing: managers of fields are no change."""
        return item

    def delete(self, kind: str, namespace: str, name: str, *, uid: str | None = None) -> None:
        self.changes.append(Change(verb="delete", kind=kind, name=name))

    def _kept(self, kind: str, metadata: Manifest, after: Manifest) -> Manifest:
        before = super().get(kind, metadata["namespace"], metadata["name"])
        found = differences(before or {}, after)
        if kind == "Secret":
            found = [Difference(path=each.path, before=_SECRET, after=_SECRET) for each in found]
        if found:
            name = metadata["name"]
            self.changes.append(Change(verb="update", kind=kind, name=name, differences=found))
        return {"kind": kind, **after}
