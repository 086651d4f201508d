"""Inputs of the builders besides the spec: observed or decided elsewhere, given as values."""

from __future__ import annotations

from functools import cached_property

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired.model import Delivery, delivery
from tandem.operator.desired.naming import Identity, Manifest, Role
from tandem.operator.desired.revision import revision_of
from tandem.operator.settings import OperatorSettings
from tandem.protocol.card import WIRE


class Facts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Inputs of the builders."""

    owner: Identity
    spec: LLMServiceSpec
    settings: OperatorSettings
    pinned: str | None = None
    """Commit to which a moving model revision was resolved."""
    may_have_job: bool = True
    """Whether the model's Job may exist now."""
    key_generation: int = 1
    publics: dict[str, str] = {}
    """Public CURVE keys, by ``role.generation``."""
    moved: frozenset[Role] = frozenset()
    """Roles that get a revision of their own because others get pods of another wire."""
    last_counts: dict[Role, int] = {}
    """Replicas that roles with a scaler had last."""
    kept: dict[Role, list[Manifest]] = {}
    """Templates of revisions that have pods, or may get some again, whatever the spec is now."""

    @cached_property
    def delivery(self) -> Delivery:
        """Delivery of the spec's model."""
        return delivery(self.spec)

    @cached_property
    def revisions(self) -> dict[Role, str]:
        """Revisions of the spec, by role."""
        return {
            role: revision_of(
                self.spec,
                role,
                pinned=self.pinned,
                key_generation=self.key_generation,
                wire=WIRE if role in self.moved else None,
            )
            for role in Role
        }

    def revision(self, role: Role) -> str:
        """Return the revision of the spec."""
        return self.revisions[role]
