"""All children of a service: ``desired`` composes the builders, and decides nothing by itself.

Pure; called by ``reconcile``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.operator.desired import access, disruption, network, router, scaler, secrets
from tandem.operator.desired.extras import labelled
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.job import model_job
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.workload import RevisionKey, deployment, rendered, stored_template


class Objects(msgspec.Struct, frozen=True, kw_only=True):
    """What shall be in the cluster."""

    applied: list[Manifest]
    """Kept as they are here, by server-side apply."""
    created: list[Manifest]
    """Made when absent, never written again."""


def desired(
    facts: Facts,
    counts: Mapping[RevisionKey, int],
    templates: Mapping[RevisionKey, Manifest],
    *,
    routers: str | None = None,
) -> Objects:
    """Children for ``counts`` replicas by role and revision.

    ``templates`` are those that are stored; that of the spec's own revision is rendered when it is
    not among them; without a template, or without a replica ever, there is no Deployment. Clients
    reach routers of revision ``routers`` only, or of all for None. Raises TemplateConflict.
    """
    applied = [*base(facts), labelled(facts.spec, router.service(facts, routers))]
    created = list(scaler.scalers(facts).values())
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


def base(facts: Facts) -> list[Manifest]:
    """Children that belong to no revision."""
    children = [
        *access.service_accounts(facts),
        *access.router_role(facts),
        secrets.peers(facts),
        *network.network_policies(facts),
        *disruption.budgets(facts),
    ]
    return [labelled(facts.spec, each) for each in children]


def target_revisions(facts: Facts) -> dict[Role, str]:
    """Revision that the spec asks for, by role."""
    return {role: facts.revision(role) for role in Role}
