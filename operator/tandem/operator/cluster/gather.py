"""Snapshot of a service's children from the store, and objects that its spec names."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import msgspec

from tandem.operator.api.model import SourceType
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import Reason
from tandem.operator.cluster.apply import is_ours
from tandem.operator.cluster.client import Cluster, ClusterError, Refused, unanswered
from tandem.operator.cluster.store import CHILDREN, Key, Store
from tandem.operator.decide.observe import Snapshot
from tandem.operator.desired.naming import Identity, Manifest
from tandem.operator.desired.policy import node_local_volume


def snapshot(store: Store, owner: Identity, since: str) -> Snapshot:
    """Return all children of a service that was made at ``since``.

    Labelled objects of other owners, or of an earlier service of the same name, are omitted.
    """
    by_kind: dict[str, dict[str, Manifest]] = {kind: {} for kind in CHILDREN}
    for item in store.children((owner.namespace, owner.name)):
        kind, metadata = item["kind"], item["metadata"]
        if not is_ours(item, owner):
            continue
        if kind == "Pod" and metadata["creationTimestamp"] < since:
            continue  # their ReplicaSets own them: their age decides
        by_kind[kind][metadata["name"]] = item
    return Snapshot(by_kind)


_SOON, _SELDOM = 3.0, 60.0


class _Known(msgspec.Struct, frozen=True):
    named: str
    """Names in the spec at the last read."""
    missing: str | None
    until: float
    wait: float
    """Seconds for which it counts."""


class References:
    """Secrets and claims of users, which are not watched but read at intervals.

    Missing ones are read again soon at first, then once a minute.
    """

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self._known: dict[Key, _Known] = {}

    def missing(self, key: Key, spec: LLMServiceSpec) -> tuple[str | None, Refused | None]:
        """Return a missing Secret or claim, as ``Reason: message``.

        If the API server does not answer, return the last known one and the error. Raises
        ClusterError.
        """
        try:
            return self._missing(key, spec), None
        except ClusterError as error:
            known = self._known.get(key)
            unknown = unanswered("what the spec names cannot be looked for", error)
            return (None if known is None else known.missing), unknown

    def _missing(self, key: Key, spec: LLMServiceSpec) -> str | None:
        named, now = repr([*_secrets(spec), *_claims(spec)]), time.monotonic()
        known = self._known.get(key)
        if known is not None and known.named == named and now < known.until:
            return known.missing
        missing = missing_reference(self._cluster, key[0], spec)
        wait = self._seconds * (1 + random.random())
        if missing is not None:
            again = known is not None and known.missing == missing
            wait = min(2 * known.wait, _SELDOM) if known is not None and again else _SOON
        self._known[key] = _Known(named, missing, now + wait, wait)
        return missing

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)


def missing_reference(cluster: Cluster, namespace: str, spec: LLMServiceSpec) -> str | None:
    """Return a missing Secret or claim of the spec, as ``Reason: message``."""
    for name, key, field in _secrets(spec):
        secret = cluster.get("Secret", namespace, name)
        if secret is None:
            return f"{Reason.SECRET_NOT_FOUND}: {field} names Secret {name}, which does not exist"
        if key is not None and key not in (secret.get("data") or {}):
            return f"{Reason.SECRET_NOT_FOUND}: {field}: Secret {name} has no key {key}"
    for name, field in _claims(spec):
        claim = cluster.get("PersistentVolumeClaim", namespace, name)
        if claim is None:
            return (
                f"{Reason.CLAIM_NOT_FOUND}: {field} names PersistentVolumeClaim {name}, "
                "which does not exist"
            )
        if claim["spec"].get("accessModes") == ["ReadWriteOncePod"]:
            return f"{Reason.ACCESS_MODE}: {field}: claim {name} can be mounted by one pod only"
    return None


def _secrets(spec: LLMServiceSpec) -> Iterable[tuple[str, str | None, str]]:
    hub = spec.model.source.hub
    if hub is not None and hub.token_secret_ref is not None:
        reference = hub.token_secret_ref
        yield reference.name, reference.key, "spec.model.source.hub.tokenSecretRef"
    auth = spec.router.auth
    if auth.api_keys_secret_ref is not None:
        yield auth.api_keys_secret_ref.name, None, "spec.router.auth.apiKeysSecretRef"
    if auth.admin_keys_secret_ref is not None:
        yield auth.admin_keys_secret_ref.name, None, "spec.router.auth.adminKeysSecretRef"


def _claims(spec: LLMServiceSpec) -> Iterable[tuple[str, str]]:
    source, cache = spec.model.source, spec.model.cache
    if source.type is SourceType.CLAIM and source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim.claim_name
        yield claim, "spec.model.source.persistentVolumeClaim"
    if cache is not None and cache.persistent_volume_claim is not None:
        yield cache.persistent_volume_claim.claim_name, "spec.model.cache"
    volume = spec.kv_transfer.node_local.volume
    mounted = node_local_volume(spec) is not None  # with mode Disabled it is not mounted
    if mounted and volume is not None and volume.persistent_volume_claim is not None:
        claim = volume.persistent_volume_claim.claim_name
        yield claim, "spec.kvTransfer.nodeLocal.volume"
