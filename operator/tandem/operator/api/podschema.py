"""Schema of a podTemplate without Kubernetes' own, which is too large for a CRD.

Enough that a map where a list belongs, or a number where a text does, is refused when it is written
and named by the API server; the rest is the dry run's. Fields that stand nowhere here pass. Called
by ``values``.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_KUBERNETES = "As in a Pod; see kubectl explain pod.{path}."

_NAME = r"[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
_LABEL = r"[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?"
_HOST = rf"({_LABEL}(\.{_LABEL})*|\[[a-fA-F0-9:]+\])"
_TAG = r"[A-Za-z0-9_][-A-Za-z0-9_.]{0,127}"
_DIGEST = r"[a-z0-9]+([+._-][a-z0-9]+)*:[0-9a-fA-F]{32,128}"
IMAGE = rf"^({_HOST}(:[0-9]{{1,5}})?/)?{_NAME}(/{_NAME})*(:{_TAG})?(@{_DIGEST})?$"
"""Image references by the grammar of OCI's distribution specification."""
QUANTITY = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+(\.[0-9]*)?)?$"
"""Kubernetes' quantities, none below zero."""

_CONTAINER = {
    "name": "string",
    "image": "image",
    "imagePullPolicy": "string",
    "command": "strings",
    "args": "strings",
    "workingDir": "string",
    "env": "named",
    "envFrom": "maps",
    "ports": "maps",
    "resources": "resources",
    "volumeMounts": "maps",
    "volumeDevices": "maps",
    "securityContext": "map",
    "livenessProbe": "map",
    "readinessProbe": "map",
    "startupProbe": "map",
    "lifecycle": "map",
}
_POD = {
    "volumes": "named",
    "nodeSelector": "texts",
    "nodeName": "string",
    "affinity": "map",
    "tolerations": "maps",
    "topologySpreadConstraints": "maps",
    "imagePullSecrets": "named",
    "securityContext": "map",
    "serviceAccountName": "string",
    "automountServiceAccountToken": "boolean",
    "hostNetwork": "boolean",
    "hostPID": "boolean",
    "hostIPC": "boolean",
    "hostUsers": "boolean",
    "shareProcessNamespace": "boolean",
    "priorityClassName": "string",
    "runtimeClassName": "string",
    "schedulerName": "string",
    "dnsPolicy": "string",
    "dnsConfig": "map",
    "hostAliases": "maps",
    "resourceClaims": "named",
    "terminationGracePeriodSeconds": "integer",
}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def resources_schema() -> Schema:
    """Return the schema of a container's resources: quantities by name, and claims."""
    quantity: Schema = {"x-kubernetes-int-or-string": True, "pattern": QUANTITY}
    quantities: Schema = {"type": "object", "nullable": True, "additionalProperties": quantity}
    return {
        "type": "object",
        **_OPEN,
        "properties": {
            "requests": {**quantities, "description": "Amounts that are reserved, by resource."},
            "limits": {**quantities, "description": "Amounts that may be used, by resource."},
        },
    }


def pod_template_schema() -> Schema:
    """Schema of podTemplate."""
    return {
        "type": "object",
        **_OPEN,
        "properties": {"metadata": _metadata(), "spec": _spec()},
    }


def _metadata() -> Schema:
    return {
        "type": "object",
        **_OPEN,
        "description": "Labels and annotations added to the pods.",
        "properties": {
            "labels": {
                **_TEXTS,
                "description": "Labels; those of Tandem and of the selector may not be changed.",
            },
            "annotations": {**_TEXTS, "description": "Annotations."},
        },
    }


def _spec() -> Schema:
    containers = {
        field: {
            "type": "array",
            "nullable": True,
            "description": text,
            "items": {"type": "object", **_OPEN, "properties": _fields(_CONTAINER, _path(field))},
        }
        for field, text in (
            ("containers", "Containers by name; main is Tandem's, others are added."),
            ("initContainers", "Init containers by name; fetch, where there is one, is Tandem's."),
        )
    }
    return {
        "type": "object",
        **_OPEN,
        "description": "Merged over the operator's pod by Kubernetes' keys.",
        "properties": {**containers, **_fields(_POD, "spec")},
    }


def _path(field: str) -> str:
    return f"spec.{field}"


def _fields(kinds: dict[str, str], path: str) -> Schema:
    return {
        name: {
            **_kind(kind),
            "nullable": True,
            "description": _KUBERNETES.format(path=f"{path}.{name}"),
        }
        for name, kind in kinds.items()
    }


def _kind(kind: str) -> Schema:
    """A schema by its short name."""
    anything: Schema = {"type": "object", **_OPEN}
    if kind == "map":
        return anything
    if kind == "image":
        return {"type": "string", "pattern": IMAGE}
    if kind == "resources":
        return resources_schema()
    if kind == "maps":
        return {"type": "array", "items": anything}
    if kind == "named":
        name = {"type": "string", "description": "Its name."}
        return {"type": "array", "items": {**anything, "properties": {"name": name}}}
    if kind == "strings":
        return {"type": "array", "items": {"type": "string"}}
    return dict(_TEXTS) if kind == "texts" else {"type": kind}
