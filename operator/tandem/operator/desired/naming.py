"""Names, labels and owners of children. They are fixed: selectors cannot change later."""

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
    """Return a map of user input, or {} for another kind."""
    return value if isinstance(value, dict) else {}


def maps_of(value: Any) -> list[Manifest]:
    """Return the maps in a list, or [] for another kind."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


APP = "tandem"
MANAGER = "tandem-operator"
"""Field manager of server-side apply, and managed-by label."""

_UID_DIGITS = 8


class Role(StrEnum):
    """Roles that have pods."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


WORKERS = (Role.PREFILL, Role.DECODE)
MODEL_COMPONENT = "model"


class Identity(msgspec.Struct, frozen=True):
    """Resource to which children belong."""

    namespace: str
    name: str
    uid: str
    plain_secrets: bool = False
    """Whether Secrets have names without digits, from an earlier release."""

    def child(self, *parts: str) -> str:
        return "-".join((self.name, *parts))

    def secret(self, *parts: str) -> str:
        """Return the name of a Secret of this UID.

        A new resource of the same name has other names, because nodes cache immutable Secrets.
        """
        if self.plain_secrets:
            return self.child(*parts)
        return self.child(*parts, hashlib.sha256(self.uid.encode()).hexdigest()[:_UID_DIGITS])

    def labels(self, component: str | None = None) -> dict[str, str]:
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
        return {
            **self.labels(role),
            LABEL_ROLE: role,
            LABEL_REVISION: revision,
            LABEL_MODEL: model,
        }

    def metadata(self, name: str, component: str | None = None, **more: Any) -> Manifest:
        """Return the metadata of a child, with its owner."""
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
