"""LLMRoleScalers: made with the replicas that the role had last, else the spec's; then only read.

Pure; called by ``compose``.
"""

from __future__ import annotations

from tandem.operator.api.scaler import ScaledRole
from tandem.operator.api.values import API_VERSION
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import WORKERS, Manifest, Role
from tandem.operator.desired.policy import asked_replicas, is_external, scaling_bounds

SCALED = {Role.PREFILL: ScaledRole.PREFILL, Role.DECODE: ScaledRole.DECODE}


def scalers(facts: Facts) -> dict[Role, Manifest]:
    """Return a scaler for each role that is scaled from outside."""
    return {role: _scaler(facts, role) for role in WORKERS if is_external(facts.spec, role)}


def _scaler(facts: Facts, role: Role) -> Manifest:
    low, high = scaling_bounds(facts.spec, role)
    seed = min(max(facts.last_counts.get(role, asked_replicas(facts.spec, role)), low), high)
    return {
        "apiVersion": API_VERSION,
        "kind": "LLMRoleScaler",
        "metadata": facts.owner.metadata(facts.owner.child(role), role),
        "spec": {
            "serviceName": facts.owner.name,
            "role": str(SCALED[role]),
            "replicas": seed,
        },
    }
