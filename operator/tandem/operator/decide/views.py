"""What a decision about replicas is made of: revisions of roles as they were seen, what is
remembered, what the spec says of a rollout. Values alone; ``plan`` makes them, ``rollout`` and
``answered`` read them.
"""

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
    """Pods of it, those that are leaving included."""
    unschedulable: bool = False
    """A pod of it has been without a node for too long."""
    full: bool = False
    """A quota has had no room for a pod of it for too long."""
    overdrawn: bool = False
    """That quota holds more already than it allows: a pod that goes makes no room there."""


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """One role."""

    desired: int
    target: str
    revisions: dict[str, RevisionView] = {}
    max_unavailable: int = 1

    def of(self, revision: str | None) -> RevisionView:
        """A revision's view, empty where there is none."""
        return self.revisions.get(revision or "", RevisionView())


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision is made of."""

    roles: dict[Role, RoleView]
    memory: RolloutStatus
    now: float
    canary_ok: bool = False
    """The canary was right on the targets."""
    suspended: bool = False
    gives_way: bool = False
    """Another service comes up first: the first revision has no pods meanwhile."""
    paused: bool = False
    non_retryable: bool = False
    """The targets cannot come up before a person changes something: no deadline is awaited."""
    surge: Surge = Surge.AUTO
    deadline: float = 1200.0
