"""A cluster that is read as it is and never written to: each write is tried by the API server as a
dry run, compared with what is there, and kept as a change.

So a rehearsal meets what the operator would meet (defaults, admission, names that are taken), and
needs the rights that the operator's writes do. Called as ``Cluster`` is.
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
    """What would become of one object."""

    verb: str
    """create, update or delete."""
    kind: str
    name: str
    differences: list[Difference] = []
    """Of an update."""


class Stage(Cluster):
    """Keeps changes in the order in which the operator would make them."""

    def __init__(self, *, kubeconfig: Path | None = None) -> None:
        super().__init__(pool=2, kubeconfig=kubeconfig)
        self.changes: list[Change] = []
        self.status: LLMServiceStatus | None = None
        """What would be told, where that differs from what is."""
        self._made: dict[tuple[str, str], Manifest] = {}
        """What would be there by now, by kind and name."""

    def made(self, kind: str, name: str) -> Manifest:
        """An object that would have been made."""
        return self._made[(kind, name)]

    def taken(self, manifest: Manifest) -> Manifest:
        """An object in the place of the one that it was read from, as the API server would have
        it; no change of the operator's."""
        return super().replace(manifest, dry_run=True)

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object as it would be, or None."""
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
        """Keep that it would be made; None when it is there already."""
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
        """Whether a pod is refused only because its account is yet to be made."""
        account = manifest.get("spec", {}).get("serviceAccountName", "")
        made = ("ServiceAccount", account) in self._made
        return manifest["kind"] == "Pod" and error.status == _FORBIDDEN and made

    def replace(self, manifest: Manifest, *, dry_run: bool = True) -> Manifest:
        """Keep what writing it back would change."""
        result = super().replace(manifest, dry_run=True)
        kept = self._kept(manifest["kind"], manifest["metadata"], result)
        self._made[(manifest["kind"], manifest["metadata"]["name"])] = kept
        return kept

    def patch(self, kind: str, namespace: str, name: str, body: Manifest) -> Manifest | None:
        """Keep what would be marked; the operator patches annotations alone."""
        given = body["metadata"]["annotations"]
        marks = [
            Difference(path=f"metadata.annotations.{key}", before=None, after=value or "(none)")
            for key, value in sorted(given.items())
        ]
        self.changes.append(Change(verb="update", kind=kind, name=name, differences=marks))
        return super().get(kind, namespace, name)

    def patch_pod_status(self, namespace: str, name: str, body: Manifest) -> Manifest | None:
        """Nothing: whose address answers is not rehearsed."""
        return super().get("Pod", namespace, name)

    def write_fields(self, item: Manifest, entries: list[Manifest]) -> Manifest:
        """Nothing: who manages a field is no change of it."""
        return item

    def delete(self, kind: str, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Keep that it would go."""
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
