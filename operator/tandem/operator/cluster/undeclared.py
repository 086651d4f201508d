"""Fields of a status that older CRDs of the cluster do not declare.

The API server refuses a status with such a field. The first refusal names them: later they are
omitted and reported.
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
"""Annotation of `kubectl rollout restart`."""
_RESTART_PATH = ("f:spec", "f:template", "f:metadata", "f:annotations", f"f:{RESTARTED_AT}")
_OURS = {"Service": ("f:ports", "f:selector", "f:type")}
"""Fields that only the operator writes."""


def is_tampered(live: Manifest, *, by_scaling: bool = False) -> bool:
    """Return whether another manager wrote to fields that are ours alone.

    Server-side apply does not remove others' entries in lists and maps.
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
    if restarted is not None:  # without it pods would be replaced again
        whole = copy.deepcopy(whole)
        whole["spec"]["template"]["metadata"].setdefault("annotations", {})[RESTARTED_AT] = (
            restarted
        )
    return whole


def _annotations(live: Manifest) -> dict[str, str]:
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
"""Maximum refusals of one status; each names all fields of a level."""
_AGAIN_SECONDS = 300.0
"""Seconds after which fields are tried again, as CRDs may be upgraded."""
ADVICE = "upgrade it: kubectl apply --server-side --force-conflicts -k manifests/crds"

Path = tuple[str, ...]


class Undeclared:
    """Undeclared fields of all services. Thread-safe."""

    def __init__(self, counted: Callable[[int], object] = lambda _number: None) -> None:
        """``counted`` is called with the number of omitted fields."""
        self._counted = counted
        self._fields: dict[str, set[Path]] = {}
        self._since = 0.0
        self._lock = Lock()

    def apply(self, cluster: Cluster, manifest: Manifest) -> Manifest:
        """Apply the declared part of a status. Raises ClusterError."""
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
        with self._lock:
            fields = list(self._fields.get(kind, ()))
        for path in fields:
            status = _without(status, path)
        return status

    def problem(self, kind: str) -> str | None:
        """Return the omitted fields and the remedy, or None."""
        with self._lock:
            fields = sorted(".".join(("status", *path)) for path in self._fields.get(kind, ()))
        if not fields:
            return None
        return f"the CRD of {kind} is of an earlier release and lacks {', '.join(fields)}; {ADVICE}"

    def _learn(self, kind: str, message: str) -> bool:
        """Take in the fields of a refusal; return whether any was new."""
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
    """Return the names of the fields below the status; items of lists have none."""
    return tuple(_INDEX.sub("", named).split("."))[1:]


def _without(value: Any, path: Path) -> Any:
    """Return a copy without the field at a path, in every item of lists."""
    if isinstance(value, list):
        return [_without(each, path) for each in value]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return {key: each for key, each in value.items() if key != path[0]}
    return {**value, path[0]: _without(value[path[0]], path[1:])}
