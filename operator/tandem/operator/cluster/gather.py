"""Reads a service and everything that belongs to it, live, in one go.

No cache: a watch only says when to look, so a watch event that never came costs time and never
truth. Called by ``reconcile`` in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tandem.operator.api.conditions import Reason
from tandem.operator.api.model import SourceType
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.cluster.client import Cluster
from tandem.operator.decide.snapshot import Snapshot
from tandem.operator.desired.naming import Identity, Manifest
from tandem.protocol.names import LABEL_SERVICE

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


def snapshot(cluster: Cluster, pool: ThreadPoolExecutor, owner: Identity, since: str) -> Snapshot:
    """All children of a service that was made at ``since``. Raises ClusterError.

    What belongs to an earlier service of the same name, and is about to be collected, is left out.
    """
    namespace, selector = owner.namespace, f"{LABEL_SERVICE}={owner.name}"
    futures = {kind: pool.submit(cluster.items, kind, namespace, selector) for kind in CHILDREN}
    by_kind = {}
    for kind, future in futures.items():
        items = [item for item in future.result() if not _is_anothers(item, owner.uid)]
        if kind == "Pod":  # owned by ReplicaSets: their age tells
            items = [item for item in items if item["metadata"]["creationTimestamp"] >= since]
        for item in items:  # lists leave these out
            item.setdefault("kind", kind)
        by_kind[kind] = {item["metadata"]["name"]: item for item in items}
    return Snapshot(by_kind)


def _is_anothers(item: Manifest, uid: str) -> bool:
    owners = item["metadata"].get("ownerReferences") or ()
    services = [each["uid"] for each in owners if each["kind"] == "LLMService"]
    return bool(services) and uid not in services


def missing_reference(cluster: Cluster, namespace: str, spec: LLMServiceSpec) -> str | None:
    """A Secret or claim that the spec names and that is not there, as ``Reason: message``."""
    for name, key, field in _secrets(spec):
        secret = cluster.get("Secret", namespace, name)
        if secret is None:
            return f"{Reason.SECRET_NOT_FOUND}: {field} names Secret {name}, which is not there"
        if key is not None and key not in (secret.get("data") or {}):
            return f"{Reason.SECRET_NOT_FOUND}: {field}: Secret {name} has no key {key}"
    for name, field in _claims(spec):
        claim = cluster.get("PersistentVolumeClaim", namespace, name)
        if claim is None:
            return (
                f"{Reason.CLAIM_NOT_FOUND}: {field} names PersistentVolumeClaim {name}, "
                "which is not there"
            )
        if claim["spec"].get("accessModes") == ["ReadWriteOncePod"]:
            return f"{Reason.ACCESS_MODE}: {field}: claim {name} can be mounted by one pod only"
    return None


def _secrets(spec: LLMServiceSpec) -> Iterable[tuple[str, str | None, str]]:
    hub = spec.model.source.hub
    if hub is not None and hub.token_secret_ref is not None:
        reference = hub.token_secret_ref
        yield reference.name, reference.key, "spec.model.source.hub.tokenSecretRef"
    keys = spec.router.auth.api_keys_secret_ref
    if keys is not None:
        yield keys.name, None, "spec.router.auth.apiKeysSecretRef"


def _claims(spec: LLMServiceSpec) -> Iterable[tuple[str, str]]:
    source, cache = spec.model.source, spec.model.cache
    if source.type is SourceType.CLAIM and source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim.claim_name
        yield claim, "spec.model.source.persistentVolumeClaim"
    if cache is not None and cache.persistent_volume_claim is not None:
        yield cache.persistent_volume_claim.claim_name, "spec.model.cache"
    volume = spec.kv_transfer.node_local.volume
    if volume is not None and volume.persistent_volume_claim is not None:
        claim = volume.persistent_volume_claim.claim_name
        yield claim, "spec.kvTransfer.nodeLocal.volume"
