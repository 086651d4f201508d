"""Client that stores its own answers at once, so that reads include the last write."""

from __future__ import annotations

from typing import Any

from tandem.operator.cluster.client import Cluster
from tandem.operator.cluster.store import Store
from tandem.operator.desired.naming import Manifest


class Mirror(Cluster):
    """``Cluster`` that puts answers into ``store``."""

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
        return result if dry_run else self._heard(manifest["kind"], result)

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest | None:
        made = super().create(manifest, dry_run=dry_run)
        return made if dry_run or made is None else self._heard(manifest["kind"], made)

    def replace(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        result = super().replace(manifest, dry_run=dry_run)
        return result if dry_run else self._heard(manifest["kind"], result)

    def patch(self, kind: str, namespace: str, name: str, body: Manifest) -> Manifest | None:
        found = super().patch(kind, namespace, name, body)
        return None if found is None else self._heard(kind, found)

    def patch_pod_status(self, namespace: str, name: str, body: Manifest) -> Manifest | None:
        found = super().patch_pod_status(namespace, name, body)
        return None if found is None else self._heard("Pod", found)

    def write_fields(self, item: Manifest, entries: list[Manifest]) -> Manifest:
        return self._heard(item["kind"], super().write_fields(item, entries))

    def _heard(self, kind: str, item: Manifest) -> Manifest:
        self._store.put(kind, item)
        return item
