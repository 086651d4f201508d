"""PodDisruptionBudgets: one a role, across its revisions. Pure; called by ``compose``."""

from __future__ import annotations

from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.policy import max_unavailable


def budgets(facts: Facts) -> list[Manifest]:
    """Return a budget a role; pods that are not ready may always be evicted."""
    return [_budget(facts, role) for role in Role]


def _budget(facts: Facts, role: Role) -> Manifest:
    owner = facts.owner
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(owner.child(role), role),
        "spec": {
            "maxUnavailable": max_unavailable(facts.spec, role),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": owner.selector(role)},
        },
    }
