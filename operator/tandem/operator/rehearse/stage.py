"""A cluster that is read directly and never written to; called as ``Cluster`` is.

The API server tries each write as a dry run, which is compared with the existing object, and kept
as a change. So a rehearsal meets the conditions of the operator (defaults, admission, names that
are taken), and requires the rights that the operator's writes do.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandem.operator.api.status import LLMServiceStatus
from tandem.operator.cluster.client import Cluster, ClusterError
from tandem.operator.desired.naming import Manifest
from tandem.operator.rehearse.difference import Difference, differences

_SECRET = "its data is not shown"
_FORBIDDEN = 403


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Change that one object would have."""

    verb: str
    """Kind of the change: create, update or delete."""
    kind: str
    name: str
    differences: list[Difference] = []
    """Differences of an update."""


class Stage(Cluster):
    """Stand-in of a cluster that keeps changes in the order in which the operator makes them."""

    def __init__(self, *, kubeconfig: Path | None = None) -> None:
        super().__init__(pool=2, kubeconfig=kubeconfig)
        self.changes: list[Change] = []
        self.status: LLMServiceStatus | None = None
        """Status that would be written, if it differs from the existing one."""
        self._made: dict[tuple[str, str], Manifest] = {}
        """Objects that would exist by now, by kind and name."""

    def made(self, kind: str, name: str) -> Manifest:
        """Return an object that would have been made."""
        return self._made[(kind, name)]

    def taken(self, manifest: Manifest) -> Manifest:
        """Return an object in place of the one that it was read from, as the API server would have
        it; it does not count as a change of the operator's."""
        return super().replace(manifest, dry_run=True)

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return one object as it would be, or None."""
        return self._made.get((kind, name)) or super().get(kind, namespace, name)

    def apply(self, manifest: Manifest, *, subresource: str = "", dry_run: bool = True) -> Manifest:
        """Keep what an apply would change. A service's status is kept whole."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        if subresource:
            if kind == "LLMService":
                self.status = msgspec.convert(manifest["status"], LLMServiceStatus)
            return manifest
        made = self._made.get((kind, metadata["name"]))
        if made is not None:  # put right from somebody's edit just now, wholly
            return made
        return self._kept(kind, metadata, super().apply(manifest, dry_run=True))

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest | None:
        """Keep that it would be made; None when it exists already."""
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
        """Keep the change of a replacement."""
        result = super().replace(manifest, dry_run=True)
        kept = self._kept(manifest["kind"], manifest["metadata"], result)
        self._made[(manifest["kind"], manifest["metadata"]["name"])] = kept
        return kept

    def patch(self, kind: str, namespace: str, name: str, body: Manifest) -> Manifest | None:
        """Keep the changed annotations; the operator patches nothing else."""
        given = body["metadata"]["annotations"]
        marks = [
            Difference(path=f"metadata.annotations.{key}", before=None, after=value or "(none)")
            for key, value in sorted(given.items())
        ]
        self.changes.append(Change(verb="update", kind=kind, name=name, differences=marks))
        return super().get(kind, namespace, name)

    def patch_pod_status(self, namespace: str, name: str, body: Manifest) -> Manifest | None:
        """Do nothing: answers of addresses are not rehearsed."""
        return super().get("Pod", namespace, name)

    def write_fields(self, item: Manifest, entries: list[Manifest]) -> Manifest:
        """Do nothing: a manager of a field is not a change of it."""
        return item

    def delete(self, kind: str, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Keep that it would be deleted."""
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
