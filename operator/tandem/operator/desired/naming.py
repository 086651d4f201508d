"""Names, labels and owners of children: fixed for good, since selectors cannot be changed later.

Called by every builder of this folder and by ``observe``.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

import msgspec

from tandem.operator.api.values import API_VERSION
from tandem.protocol.names import (
    LABEL_APP,
    LABEL_COMPONENT,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_MODEL,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_SERVICE,
)

Manifest = dict[str, Any]


def map_of(value: Any) -> Manifest:
    """Return a map of user input; an empty one if it is not a map."""
    return value if isinstance(value, dict) else {}


def maps_of(value: Any) -> list[Manifest]:
    """Return those of a list that are maps; none if it is not a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


APP = "tandem"
MANAGER = "tandem-operator"
"""Field manager of server-side apply, and the managed-by label."""

_UID_DIGITS = 8


class Role(StrEnum):
    """Roles that have pods."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


WORKERS = (Role.PREFILL, Role.DECODE)
MODEL_COMPONENT = "model"
"""Component of the Job that fetches or reads the model."""


class Identity(msgspec.Struct, frozen=True):
    """Which resource children belong to."""

    namespace: str
    name: str
    uid: str
    plain_secrets: bool = False
    """The service's Secrets have names without digits, as an earlier release gave them."""

    def child(self, *parts: str) -> str:
        """Return the name of a child."""
        return "-".join((self.name, *parts))

    def secret(self, *parts: str) -> str:
        """Name of a Secret of this very resource: one that is deleted and made again gets others,
        since nodes keep what they read of an immutable Secret while an old pod lingers."""
        if self.plain_secrets:
            return self.child(*parts)
        return self.child(*parts, hashlib.sha256(self.uid.encode()).hexdigest()[:_UID_DIGITS])

    def labels(self, component: str | None = None) -> dict[str, str]:
        """Return the labels that every child carries."""
        labels = {
            LABEL_APP: APP,
            LABEL_INSTANCE: self.name,
            LABEL_MANAGED_BY: MANAGER,
            LABEL_SERVICE: self.name,
        }
        return labels | ({LABEL_COMPONENT: component} if component else {})

    def selector(self, component: str, revision: str | None = None) -> dict[str, str]:
        """Return the labels by which a child finds its pods."""
        labels = {LABEL_APP: APP, LABEL_INSTANCE: self.name, LABEL_COMPONENT: component}
        return labels | ({LABEL_REVISION: revision} if revision else {})

    def pod_labels(self, role: Role, revision: str, model: str) -> dict[str, str]:
        """Return the labels of a pod, the selector's among them."""
        return {
            **self.labels(role),
            LABEL_ROLE: role,
            LABEL_REVISION: revision,
            LABEL_MODEL: model,
        }

    def metadata(self, name: str, component: str | None = None, **more: Any) -> Manifest:
        """Metadata of a child: it goes when the resource goes, without a finalizer."""
        owner = {
            "apiVersion": API_VERSION,
            "kind": "LLMService",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        labels = self.labels(component) | more.pop("labels", {})
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": labels,
            "ownerReferences": [owner],
            **more,
        }
