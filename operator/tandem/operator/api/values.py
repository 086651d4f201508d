"""Scalars and references that fields of the resources are made of, each with its bounds.

Every string and list that a validation rule touches has a length: the API server counts a rule's
worst case from them. Called by the other modules of ``api`` only.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.operator.api.podschema import (
    IMAGE,
    QUANTITY,
    pod_template_schema,
    resources_schema,
)

GROUP = "tandem.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


class Api(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of every object in a resource: camelCase outside, nothing written that was not said."""


def doc(text: str, **schema: Any) -> Meta:
    """Description of a field, with further keys of its schema."""
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
"""Keys that Tandem, kubectl and Kubernetes' controllers set themselves."""


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
