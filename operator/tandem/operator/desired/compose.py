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
    """Objects that shall be in the cluster."""

    applied: list[Manifest]
    """Objects that are kept in this state, by server-side apply."""
    created: list[Manifest]
    """Objects that are made when absent, and never written again."""


def desired(
    facts: Facts,
    counts: Mapping[RevisionKey, int],
    templates: Mapping[RevisionKey, Manifest],
    *,
    routers: str | None = None,
) -> Objects:
    """Return the children for ``counts`` replicas by role and revision.

    ``templates`` are the stored ones; that of the spec's own revision is rendered when it is not
    among them. Without a template, or without a replica ever, there is no Deployment. Clients reach
    routers of revision ``routers`` only, or of all for None. Raises TemplateConflict.
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
    """Return the children that belong to no revision."""
    children = [
        *access.service_accounts(facts),
        *access.router_role(facts),
        secrets.peers(facts),
        *network.network_policies(facts),
        *disruption.budgets(facts),
    ]
    return [labelled(facts.spec, each) for each in children]


def target_revisions(facts: Facts) -> dict[Role, str]:
    """Return the revisions of the spec, by role."""
    return dict(facts.revisions)
