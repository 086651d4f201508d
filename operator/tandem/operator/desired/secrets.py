"""Secrets that the operator makes once, and the public keys."""

from __future__ import annotations

from tandem.operator.desired.containers import labelled
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.pod import keys_secret
from tandem.operator.desired.router import canary_secret
from tandem.protocol import names

LABEL_GENERATION = "tandem.dev/key-generation"
ANNOTATION_PUBLIC = "tandem.dev/curve-public"
"""Annotation with the public key."""


def keys(facts: Facts, role: Role, public: str, secret: str) -> Manifest:
    """Return the Secret with a role's key pair of the current generation."""
    labels = {LABEL_GENERATION: str(facts.key_generation), names.LABEL_ROLE: role}
    metadata = facts.owner.metadata(
        keys_secret(facts, role),
        role,
        labels=labels,
        annotations={ANNOTATION_PUBLIC: public},
    )
    data = {names.CURVE_PUBLIC_FILE: public, names.CURVE_SECRET_FILE: secret}
    return labelled(facts.spec, _secret(metadata, data))


def public_of(secret: Manifest) -> str:
    """Return the public key of a key pair's Secret."""
    public: str = secret["metadata"]["annotations"][ANNOTATION_PUBLIC]
    return public


def canary_token(facts: Facts, token: str) -> Manifest:
    """Return the Secret with the token of canaries."""
    metadata = facts.owner.metadata(canary_secret(facts.owner), Role.ROUTER)
    return labelled(facts.spec, _secret(metadata, {names.CANARY_TOKEN_FILE: token}))


def _secret(metadata: Manifest, data: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": data,
    }


def peers(facts: Facts) -> Manifest:
    """Return the ConfigMap of public keys of all roles and generations in use."""
    data = {f"{name}.public": public for name, public in sorted(facts.publics.items())}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": facts.owner.metadata(facts.owner.child("peers")),
        "data": data,
    }
