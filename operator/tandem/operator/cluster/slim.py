"""Slimmed objects that hold only the fields that looks read, to save memory. Pure.

Called by ``store``. A private key is never kept: only its pods require it.
"""

from __future__ import annotations

from tandem.operator.desired.naming import Manifest
from tandem.protocol.names import CANARY_TOKEN_FILE

_WRITTEN_BY_OTHERS = ("Job", "LLMRoleScaler", "LLMService", "Pod", "ControllerRevision", "Secret")
"""Kinds whose managers of fields are never read."""
_POD_STATUS = ("phase", "podIP", "conditions", "containerStatuses", "initContainerStatuses")


def slim(kind: str, item: Manifest) -> Manifest:
    """Return the object without fields that no look reads, and with its kind, which lists omit."""
    kept = {**item, "kind": kind}
    if kind in _WRITTEN_BY_OTHERS:
        kept["metadata"] = {k: v for k, v in item["metadata"].items() if k != "managedFields"}
    if kind == "Pod":
        status = item.get("status") or {}
        spec = item.get("spec") or {}
        kept["spec"] = {"volumes": spec.get("volumes") or [], "nodeName": spec.get("nodeName")}
        kept["status"] = {key: status[key] for key in _POD_STATUS if key in status}
    elif kind == "Job":
        kept.pop("spec", None)
    elif kind == "Secret":
        data = item.get("data") or {}
        kept["data"] = {key: data[key] for key in (CANARY_TOKEN_FILE,) if key in data}
    return kept
