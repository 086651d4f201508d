"""Inputs of the builders besides the spec."""

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
    """Commit of a moving model revision."""
    may_have_job: bool = True
    key_generation: int = 1
    publics: dict[str, str] = {}
    """Public CURVE keys, by ``role.generation``."""
    moved: frozenset[Role] = frozenset()
    """Roles with a new revision because others get pods of another wire."""
    last_counts: dict[Role, int] = {}
    """Last replicas of roles with a scaler."""
    kept: dict[Role, list[Manifest]] = {}
    """Templates of revisions with pods, or that may get some again."""

    @cached_property
    def delivery(self) -> Delivery:
        return delivery(self.spec)

    @cached_property
    def revisions(self) -> dict[Role, str]:
        """Return the revisions of the spec, by role."""
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
        return self.revisions[role]
