"""Secrets in any part of a pod's spec, except image pull secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired.naming import Identity, Manifest, Role

LABEL_ALLOWED, ALLOWED = "tandem.dev/llmservices", "allowed"
"""Label with which a Secret's owner allows LLMServices to use it."""
ANNOTATION_SECRETS = "tandem.dev/secrets"
"""Annotation for the admission policy: foreign Secrets of a workload."""


def secrets_of(pod: Any) -> set[str]:
    """Return the names of the Secrets in a pod's spec."""
    found: set[str] = set()
    left: list[Any] = [pod] if isinstance(pod, (dict, list)) else []
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += [each for each in part if isinstance(each, (dict, list))]
            continue
        for key, value in part.items():
            if isinstance(value, str):
                if key == "secretName":
                    found.add(value)
            elif isinstance(value, dict):
                left.append(value)
                if _is_reference(key) and isinstance(value.get("name"), str):
                    found.add(value["name"])
            elif isinstance(value, list):
                left.append(value)
    return found


def foreign_secrets(owner: Identity, pod: Any) -> list[str]:
    """Return the Secrets in a pod's spec that were not made for the service."""
    return sorted(name for name in secrets_of(pod) if not _is_own(owner, name))


def _is_own(owner: Identity, name: str) -> bool:
    starts = [owner.secret("canary"), *(owner.secret(role, "keys") + "-g" for role in Role)]
    return name == starts[0] or any(
        name.startswith(start) and name.removeprefix(start).isdecimal() for start in starts[1:]
    )


def as_named_before(owner: Identity, secrets: Iterable[str]) -> Identity:
    """Return the owner whose Secrets keep the form of their names.

    An earlier release used names without digits. A service with only such Secrets keeps that form.
    """
    plain = msgspec.structs.replace(owner, plain_secrets=True)
    usual = msgspec.structs.replace(owner, plain_secrets=False)
    names = list(secrets)
    has_plain = any(_is_own(plain, name) for name in names)
    return plain if has_plain and not any(_is_own(usual, name) for name in names) else usual


def secrets_note(owner: Identity, template: Manifest) -> dict[str, dict[str, str]]:
    """Return the metadata that lists a workload's foreign Secrets for the admission policy."""
    usual = msgspec.structs.replace(owner, plain_secrets=False)  # the policy knows only these names
    names = foreign_secrets(usual, template.get("spec"))
    return {"annotations": {ANNOTATION_SECRETS: ",".join(names)}} if names else {}


def _is_reference(key: str) -> bool:
    """Return whether a field refers to a Secret."""
    return key == "secret" or key.lower().endswith(("secretref", "secretkeyref"))


def named_secrets(spec: LLMServiceSpec) -> dict[str, str]:
    """Return the Secrets in the spec's own fields, with the field."""
    found = {}
    hub, auth = spec.model.source.hub, spec.router.auth
    if hub is not None and hub.token_secret_ref is not None:
        found[hub.token_secret_ref.name] = "spec.model.source.hub.tokenSecretRef"
    if auth.api_keys_secret_ref is not None:
        found[auth.api_keys_secret_ref.name] = "spec.router.auth.apiKeysSecretRef"
    if auth.admin_keys_secret_ref is not None:
        found[auth.admin_keys_secret_ref.name] = "spec.router.auth.adminKeysSecretRef"
    return found


def is_allowed(secret: Manifest) -> bool:
    """Return whether a Secret's owner allows LLMServices to use it."""
    labels = secret["metadata"].get("labels") or {}
    return bool(labels.get(LABEL_ALLOWED) == ALLOWED)
