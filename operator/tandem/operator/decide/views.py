"""Inputs of a decision about replicas: revisions of roles as observed, the memory, the spec's
rollout settings. Values alone; ``plan`` makes them, ``rollout`` and ``answered`` read them."""

from __future__ import annotations

import msgspec

from tandem.operator.api.service import Surge
from tandem.operator.api.status import RolloutStatus
from tandem.operator.desired.naming import Role


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of one role, as observed."""

    asked: int = 0
    """Replicas of its Deployment."""
    ready: int = 0
    present: int = 0
    """Pods of it, including those that are leaving."""
    unschedulable: bool = False
    """Whether a pod of it has been without a node for too long."""
    full: bool = False
    """Whether a quota has had no room for a pod of it for too long."""
    overdrawn: bool = False
    """Whether that quota holds more already than it allows: a deleted pod makes no room there."""


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """One role."""

    desired: int
    target: str
    revisions: dict[str, RevisionView] = {}
    max_unavailable: int = 1

    def of(self, revision: str | None) -> RevisionView:
        """Return a revision's view, empty if there is none."""
        return self.revisions.get(revision or "", RevisionView())


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a decision."""

    roles: dict[Role, RoleView]
    memory: RolloutStatus
    now: float
    canary_ok: bool = False
    """Whether the canary was right on the targets."""
    suspended: bool = False
    gives_way: bool = False
    """Whether another service comes up first: the first revision has no pods meanwhile."""
    paused: bool = False
    non_retryable: bool = False
    """Whether the targets cannot come up before a person acts: no deadline is awaited."""
    surge: Surge = Surge.AUTO
    deadline: float = 1200.0
