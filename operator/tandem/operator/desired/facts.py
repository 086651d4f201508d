"""Inputs of the builders besides the spec."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.desired.model import Delivery, delivery
from tandem.operator.desired.naming import Identity, Manifest, Role
from tandem.operator.desired.revision import revision_of
from tandem.operator.settings import OperatorSettings
from tandem.protocol.card import WIRE

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
    """Roles with a new revision because other roles get pods with another wire version."""
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

    @cached_property
    def built(self) -> dict[Any, Any]:
        """Return the results of builders, by function and arguments."""
        return {}


def once(build: Callable[Concatenate[Facts, _P], _T]) -> Callable[Concatenate[Facts, _P], _T]:
    """Return a builder that runs once for the same facts; its result must not be changed."""

    @wraps(build)
    def built(facts: Facts, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = (build, *args)
        if key not in facts.built:
            facts.built[key] = build(facts, *args, **kwargs)
        result: _T = facts.built[key]
        return result

    return built
