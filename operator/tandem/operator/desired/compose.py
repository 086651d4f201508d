"""All children of a service."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.operator.api.roles import ScaledRole
from tandem.operator.api.values import API_VERSION
from tandem.operator.desired import network, router, secrets
from tandem.operator.desired.containers import labelled
from tandem.operator.desired.facts import Facts, once
from tandem.operator.desired.job import model_job
from tandem.operator.desired.naming import WORKERS, Manifest, Role
from tandem.operator.desired.policy import (
    asked_replicas,
    is_external,
    max_unavailable,
    scaling_bounds,
)
from tandem.operator.desired.workload import (
    RevisionKey,
    deployment,
    rendered,
    stored_template,
)

_RBAC = "rbac.authorization.k8s.io"
ROUTER_RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
"""Rules of the routers' Role. RBAC cannot filter pods by label."""


def service_accounts(facts: Facts) -> list[Manifest]:
    """Return an account for routers, and one for workers and the Job, without a token."""
    return [_account(facts, "worker"), _account(facts, Role.ROUTER)]


def _account(facts: Facts, component: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": facts.owner.metadata(facts.owner.child(component), component),
        "automountServiceAccountToken": False,
    }


def router_role(facts: Facts) -> list[Manifest]:
    """Return Role and binding of the routers."""
    name = facts.owner.child(Role.ROUTER)
    metadata = facts.owner.metadata(name, Role.ROUTER)
    subject = {"kind": "ServiceAccount", "name": name, "namespace": facts.owner.namespace}
    return [
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": ROUTER_RULES,
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
            "subjects": [subject],
        },
    ]


def budgets(facts: Facts) -> list[Manifest]:
    """Return a budget per role; pods that are not ready may always be evicted."""
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


class Objects(msgspec.Struct, frozen=True, kw_only=True):
    """Wanted objects of the cluster."""

    applied: list[Manifest]
    """Objects that server-side apply keeps in this state."""
    created: list[Manifest]
    """Objects that are made if absent, and not written again."""


def desired(
    facts: Facts,
    counts: Mapping[RevisionKey, int],
    templates: Mapping[RevisionKey, Manifest],
    *,
    routers: str | None = None,
) -> Objects:
    """Return the children for ``counts`` replicas by role and revision.

    ``templates`` are the stored ones; the spec's own is rendered if missing. A revision without a
    template, or that never had a replica, has no Deployment. Clients reach routers of revision
    ``routers``, or all for None. Raises TemplateConflict.
    """
    applied = [*base(facts), labelled(facts.spec, router.service(facts, routers))]
    created = list(scalers(facts).values())
    if (job := model_job(facts)) is not None:
        created.append(job)
    for (role, revision), replicas in sorted(counts.items()):
        template = templates.get((role, revision))
        if template is None and not replicas:
            continue
        if template is None and revision == facts.revision(role):
            template = rendered(facts, role)
        if template is None:
            continue
        created.append(stored_template(facts, role, revision, template))
        made = deployment(facts, role, revision, replicas, template)
        applied.append(labelled(facts.spec, made))
    return Objects(applied=applied, created=[labelled(facts.spec, each) for each in created])


@once
def base(facts: Facts) -> list[Manifest]:
    """Return the children without a revision."""
    children = [
        *service_accounts(facts),
        *router_role(facts),
        secrets.peers(facts),
        *network.network_policies(facts),
        *budgets(facts),
    ]
    return [labelled(facts.spec, each) for each in children]


def target_revisions(facts: Facts) -> dict[Role, str]:
    """Return the revisions of the spec, by role."""
    return dict(facts.revisions)
