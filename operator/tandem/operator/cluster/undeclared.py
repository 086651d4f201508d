"""Fields of a status that the cluster's CRDs do not declare, since an earlier release made them.

The API server refuses a whole status for one such field. The first refusal names them: from then on
they are left out and reported, and the rest is written. Called by ``teller``.
"""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

from tandem.operator.cluster.client import Cluster, ClusterError
from tandem.operator.desired.naming import MANAGER, Manifest

RESTARTED_AT = "kubectl.kubernetes.io/restartedAt"
"""Annotation that `kubectl rollout restart` sets on pod templates."""
_RESTART_PATH = ("f:spec", "f:template", "f:metadata", "f:annotations", f"f:{RESTARTED_AT}")
_OURS = {"Service": ("f:ports", "f:selector", "f:type")}
"""Fields that only the operator writes; cloud controllers set some of a Service's others."""


def is_tampered(live: Manifest, *, by_scaling: bool = False) -> bool:
    """Return whether another manager wrote to fields that are ours alone.

    Server-side apply takes fields back but leaves entries that others added to lists and maps. So
    it is enough against scaling, which counts only on demand.
    """
    harmless = {"status"} if by_scaling else {"status", "scale"}
    ours = _OURS.get(live["kind"], ("f:data", "f:rules", "f:spec", "f:subjects"))
    for entry in live["metadata"].get("managedFields") or ():
        if entry["manager"] == MANAGER or entry.get("subresource") in harmless:
            continue
        fields = entry.get("fieldsV1") or {}
        if live["kind"] == "Service":
            fields = fields.get("f:spec") or {}
        if _is_restart(fields):
            continue
        if set(fields) & set(ours):
            return True
    return False


def untampered(manifest: Manifest, live: Manifest) -> Manifest:
    """Return ``manifest`` as a replacement of ``live``; others' labels and annotations stay."""
    metadata = {**live["metadata"], **manifest["metadata"]}
    metadata.pop("managedFields", None)
    for field in ("labels", "annotations"):
        both = (live["metadata"].get(field) or {}) | (manifest["metadata"].get(field) or {})
        if both:
            metadata[field] = both
    whole = {**manifest, "metadata": metadata}
    restarted = _annotations(live).get(RESTARTED_AT)
    if restarted is not None:  # without it pods would be replaced once more
        whole = copy.deepcopy(whole)
        whole["spec"]["template"]["metadata"].setdefault("annotations", {})[RESTARTED_AT] = (
            restarted
        )
    return whole


def _annotations(live: Manifest) -> dict[str, str]:
    """Return the annotations of a workload's pods."""
    template = (live.get("spec") or {}).get("template") or {}
    return (template.get("metadata") or {}).get("annotations") or {}


def _is_restart(fields: Any) -> bool:
    """Return whether managed fields are those of `kubectl rollout restart` and no more."""
    for step in _RESTART_PATH:
        if not isinstance(fields, dict) or set(fields) - {"."} != {step}:
            return False
        fields = fields[step]
    return True


logger = logging.getLogger(__name__)

_NAMED = re.compile(r"\.(status\.[^\s:]+): field not declared in schema")
_INDEX = re.compile(r"\[[^\]]*\]")
_MOST_TRIES = 8
"""Refusals of one status: the API server names all fields of a level at once."""
_AGAIN_SECONDS = 300.0
"""After which the fields are tried again: the CRDs may have been upgraded."""
ADVICE = "upgrade it: kubectl apply --server-side --force-conflicts -k manifests/crds"

Path = tuple[str, ...]


class Undeclared:
    """Thread-safe; one for all services, as CRDs are."""

    def __init__(self, counted: Callable[[int], object] = lambda _number: None) -> None:
        """Start. ``counted`` is called with the number of fields that are left out."""
        self._counted = counted
        self._fields: dict[str, set[Path]] = {}
        self._since = 0.0
        self._lock = Lock()

    def apply(self, cluster: Cluster, manifest: Manifest) -> Manifest:
        """Apply a status as far as the CRD declares it. Raises ClusterError."""
        kind = manifest["kind"]
        self._forget_after_a_while()
        for _ in range(_MOST_TRIES):
            wanted = {**manifest, "status": self.declared(kind, manifest["status"])}
            try:
                return cluster.apply(wanted, subresource="status")
            except ClusterError as error:
                if not self._learn(kind, error.message):
                    raise
        raise ClusterError(500, "Undeclared", f"the CRD of {kind} refuses every status")

    def declared(self, kind: str, status: Any) -> Any:
        """Return a status without the fields that the CRD does not declare."""
        with self._lock:
            fields = list(self._fields.get(kind, ()))
        for path in fields:
            status = _without(status, path)
        return status

    def problem(self, kind: str) -> str | None:
        """Return what is left out of the kind's statuses, and what to do; None if nothing is."""
        with self._lock:
            fields = sorted(".".join(("status", *path)) for path in self._fields.get(kind, ()))
        if not fields:
            return None
        return f"the CRD of {kind} is of an earlier release and lacks {', '.join(fields)}; {ADVICE}"

    def _learn(self, kind: str, message: str) -> bool:
        """Take in the fields of a refusal; whether any was new."""
        found = {_path(each) for each in _NAMED.findall(message)}
        with self._lock:
            known = self._fields.setdefault(kind, set())
            new = found - known
            known |= new
            self._since = self._since or time.monotonic()
            number = sum(map(len, self._fields.values()))
        if new:
            self._counted(number)
            logger.warning("%s", self.problem(kind))
        return bool(new)

    def _forget_after_a_while(self) -> None:
        with self._lock:
            due = self._since and time.monotonic() - self._since > _AGAIN_SECONDS
            if due:
                self._fields, self._since = {}, 0.0
        if due:
            self._counted(0)


def _path(named: str) -> Path:
    """Return the names of the fields below the status: items of lists have none."""
    return tuple(_INDEX.sub("", named).split("."))[1:]


def _without(value: Any, path: Path) -> Any:
    """Return a copy of a value without the field at a path, in every item of a list on the way."""
    if isinstance(value, list):
        return [_without(each, path) for each in value]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return {key: each for key, each in value.items() if key != path[0]}
    return {**value, path[0]: _without(value[path[0]], path[1:])}
