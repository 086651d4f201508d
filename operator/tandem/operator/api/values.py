"""Scalars and references in fields of the resources, with their bounds.

Every string and list in a validation rule has a length, which bounds the rule's cost.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Schema = dict[str, Any]

_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_KUBERNETES = "As in a Pod; see kubectl explain pod.{path}."

_NAME = r"[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
_LABEL = r"[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?"
_HOST = rf"({_LABEL}(\.{_LABEL})*|\[[a-fA-F0-9:]+\])"
_TAG = r"[A-Za-z0-9_][-A-Za-z0-9_.]{0,127}"
_DIGEST = r"[a-z0-9]+([+._-][a-z0-9]+)*:[0-9a-fA-F]{32,128}"
IMAGE = rf"^({_HOST}(:[0-9]{{1,5}})?/)?{_NAME}(/{_NAME})*(:{_TAG})?(@{_DIGEST})?$"
"""Image references by OCI's distribution specification."""
QUANTITY = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+(\.[0-9]*)?)?$"
"""Kubernetes' quantities, at least zero."""

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
    """Return the schema of a container's resources."""
    quantity: Schema = {"x-kubernetes-int-or-string": True, "pattern": QUANTITY}
    quantities: Schema = {"type": "object", "nullable": True, "additionalProperties": quantity}
    return {
        "type": "object",
        **_OPEN,
        "properties": {
            "requests": {**quantities, "description": "Reserved amounts, by resource."},
            "limits": {**quantities, "description": "Maximum amounts, by resource."},
        },
    }


def pod_template_schema() -> Schema:
    """Return the schema of podTemplate."""
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
                "description": "Labels. Labels of Tandem and of the selector are protected.",
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
            ("initContainers", "Init containers by name; fetch, if present, is Tandem's."),
        )
    }
    return {
        "type": "object",
        **_OPEN,
        "description": "Merged into the operator's pod by Kubernetes' keys.",
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
        name = {"type": "string", "description": "Name."}
        return {"type": "array", "items": {**anything, "properties": {"name": name}}}
    if kind == "strings":
        return {"type": "array", "items": {"type": "string"}}
    return dict(_TEXTS) if kind == "texts" else {"type": kind}


GROUP = "tandem.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


class Api(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of every object in a resource: camelCase outside, only given fields are written."""


def digest(value: Any) -> str:
    """Return eight hex digits of a JSON value."""
    text = msgspec.json.encode(msgspec.to_builtins(value), order="deterministic")
    return blake2b(text, digest_size=4, person=b"tandem-revision").hexdigest()


def doc(text: str, **schema: Any) -> Meta:
    """Return the description of a field, with further keys of its schema."""
    return Meta(description=text, extra_json_schema=schema or None)


def _checked(rule: str, message: str) -> dict[str, Any]:
    """Return the schema keys of a CEL rule that the API server applies to each value."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message}]}


Text = Annotated[str, Meta(min_length=1, max_length=1024)]
ShortText = Annotated[str, Meta(min_length=1, max_length=253)]
DnsLabel = Annotated[
    str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]
DnsName = Annotated[
    str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
SecretKey = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
Url = Annotated[str, Meta(min_length=1, max_length=2048, pattern=r"^https?://.+")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", max_length=64)]
Image = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=1024,
        extra_json_schema=_checked(
            f"self.matches(r'{IMAGE}')",
            "must be an image, as registry.example:5000/name:tag or name@sha256:DIGEST, "
            "its name in lower case",
        ),
    ),
]
RelativePath = Annotated[
    str,
    Meta(
        max_length=1024,
        extra_json_schema=_checked(
            "!self.startsWith('/') && !self.split('/').exists(part, part == '..')",
            "must be a path below the root: no / at its start and no folder named ..",
        ),
    ),
]

Replicas = Annotated[int, Meta(ge=0, le=1000)]
Degree = Annotated[int, Meta(ge=1, le=1024)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[int, Meta(ge=1, le=86400)]
Percent = Annotated[int, Meta(ge=0, le=100)]
PortNumber = Annotated[int, Meta(ge=1, le=65535)]

Quantity = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "x-kubernetes-int-or-string": True,
            "maxLength": 64,
            "pattern": QUANTITY,
        }
    ),
]
Arguments = Annotated[
    list[Annotated[str, Meta(max_length=4096)]],
    Meta(max_length=64, extra_json_schema={"x-kubernetes-list-type": "atomic"}),
]
StringMap = Annotated[dict[str, Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)]
_KEY_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY_PREFIX = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_TANDEMS = "tandem.dev/"
_RESERVED = (
    *(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "managed-by")),
    *("pod-template-hash", "controller-uid", "job-name"),
    *(f"batch.kubernetes.io/{name}" for name in ("controller-uid", "job-name")),
    "deployment.kubernetes.io/revision",
    "kubectl.kubernetes.io/last-applied-configuration",
)
"""Keys that Tandem, kubectl and Kubernetes' controllers set."""


def _keys(kind: str) -> dict[str, Any]:
    """Return the schema keys of a map of labels or annotations of children."""
    reserved = ", ".join(f"'{name}'" for name in _RESERVED)
    return {
        "x-kubernetes-validations": [
            {
                "rule": f"self.all(k, k.matches(r'^({_KEY_PREFIX}/)?{_KEY_NAME}$')"
                " && k.size() <= 317)",
                "message": f"a key of {kind} must be a name of up to 63 letters, digits, '-', '_' "
                "and '.', after a domain and '/' if any",
            },
            {
                "rule": f"!self.exists(k, k.startsWith('{_TANDEMS}') || k in [{reserved}])",
                "message": f"{kind} may not have keys of tandem.dev/, app.kubernetes.io/name, "
                "instance, component and managed-by, nor those that Kubernetes' controllers set",
            },
        ]
    }


LabelMap = Annotated[
    dict[
        str,
        Annotated[
            str, Meta(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
        ],
    ],
    Meta(max_length=32, extra_json_schema=_keys("labels")),
]
AnnotationMap = Annotated[
    dict[str, Annotated[str, Meta(max_length=4096)]],
    Meta(max_length=32, extra_json_schema=_keys("annotations")),
]
Resources = Annotated[dict[str, Any], Meta(extra_json_schema=resources_schema())]
PodTemplate = Annotated[dict[str, Any], Meta(extra_json_schema=pod_template_schema())]


class SecretKeyRef(Api, frozen=True, kw_only=True):
    """One key of a Secret in the resource's namespace."""

    name: Annotated[DnsName, doc("Name of the Secret.")]
    key: Annotated[SecretKey, doc("Key within the Secret's data.")]


class SecretRef(Api, frozen=True, kw_only=True):
    """A Secret in the resource's namespace."""

    name: Annotated[DnsName, doc("Name of the Secret.")]


PullSecrets = Annotated[
    list[SecretRef],
    Meta(
        max_length=16,
        extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
]


class ClaimRef(Api, frozen=True, kw_only=True):
    """A PersistentVolumeClaim in the resource's namespace."""

    claim_name: Annotated[DnsName, doc("Name of the PersistentVolumeClaim.")]
