"""Detection of foreign writes to a child, and their reversal. Called by ``apply`` and ``repair``.

Pure. `kubectl rollout restart` does not count as a foreign write: its annotation on a Deployment's
pods is kept, so that the Deployment's controller replaces them one by one, each draining first.
"""

from __future__ import annotations

import copy
from typing import Any

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
