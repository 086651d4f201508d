"""Immediate repair of a deleted or edited child, in addition to the passes of its service.

The manifests of the last pass are still right, and their write takes two requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import msgspec

from tandem.operator.cluster.apply import Applier, is_owned
from tandem.operator.cluster.client import Cluster, ClusterError, Refused
from tandem.operator.cluster.undeclared import is_tampered
from tandem.operator.decide.observe import Snapshot
from tandem.operator.desired.compose import Objects
from tandem.operator.desired.naming import Manifest
from tandem.operator.look import Beside, Key, Trigger, unrecorded
from tandem.operator.metrics import OperatorMetrics

logger = logging.getLogger(__name__)

Wake = Callable[[Key], None]
_THREADS = 2


class _Wanted(msgspec.Struct, frozen=True):
    """Children of one service as of the last pass, by kind and name."""

    uid: str
    applied: dict[tuple[str, str], Manifest]
    created: dict[tuple[str, str], Manifest]


class Repairs:
    """Wanted children by service. Thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        applier: Applier,
        wake: Wake,
        metrics: OperatorMetrics,
        repairing: Beside = unrecorded,
    ) -> None:
        """``repairing``: context of each repair, given service and reason."""
        self._cluster = cluster
        self._applier = applier
        self._wake = wake
        self._metrics = metrics
        self._repairing = repairing
        self._wanted: dict[Key, _Wanted] = {}
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="repairs")

    def want(self, key: Key, uid: str, objects: Objects) -> None:
        """Set the wanted children, before any other child is deleted."""
        wanted = _Wanted(uid, _by_name(objects.applied), _by_name(objects.created))
        with self._lock:
            self._wanted[key] = wanted

    def forget(self, key: Key) -> None:
        with self._lock:
            self._wanted.pop(key, None)

    def child_changed(self, key: Key, child: Manifest, *, deleted: bool) -> None:
        """Handle a changed child: repair it if it is wrong, then wake its service."""
        manifest = self._wrong(key, child, deleted=deleted)
        if manifest is None:
            self._wake(key)
            return
        try:
            self._pool.submit(self._repair, key, manifest, None if deleted else child)
        except RuntimeError:  # closed: this replica is not the leader
            self._wake(key)

    def _wrong(self, key: Key, child: Manifest, *, deleted: bool) -> Manifest | None:
        """Return the wanted manifest of a child that differs from it, else None."""
        with self._lock:
            wanted = self._wanted.get(key)
        if wanted is None:
            return None
        name = (child["kind"], child["metadata"]["name"])
        if deleted:
            return wanted.applied.get(name) or wanted.created.get(name)
        if not is_owned(child, wanted.uid):  # a look determines the owner
            return None
        return wanted.applied.get(name) if is_tampered(child, by_scaling=True) else None

    def _repair(self, key: Key, manifest: Manifest, live: Manifest | None) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        try:
            with self._repairing(key, [Trigger.CHILD]):
                done = self._put_right(key, kind, name, live)
            if done:
                self._metrics.repairs.labels(kind).inc()
                logger.info("%s/%s: %s %s was put right", *key, kind, name)
        except ClusterError as error:  # the next look tries again
            logger.warning("%s/%s: %s %s: %s", *key, kind, name, error)
        finally:
            self._wake(key)

    def _put_right(self, key: Key, kind: str, name: str, live: Manifest | None) -> bool:
        """Write one child as wanted; return whether it was wrong and is repaired."""
        if self._is_over(key):
            return False
        there = Snapshot({} if live is None else {kind: {name: live}})
        with self._lock:
            wanted = self._wanted.get(key)
        if wanted is None:
            return False
        if (kind, name) in wanted.applied:
            found = self._applier.apply([wanted.applied[(kind, name)]], there)
        elif (kind, name) in wanted.created:
            found = self._applier.create([wanted.created[(kind, name)]], there)
        else:
            return False
        for each in found:
            if isinstance(each, Refused):
                raise each.error
        return not found  # the next look reports it in the status

    def _is_over(self, key: Key) -> bool:
        """Return whether the children are deleted with their service."""
        resource = self._cluster.get("LLMService", *key)
        with self._lock:
            wanted = self._wanted.get(key)
        if resource is None or wanted is None:
            return True
        metadata = resource["metadata"]
        return metadata["uid"] != wanted.uid or "deletionTimestamp" in metadata

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}
