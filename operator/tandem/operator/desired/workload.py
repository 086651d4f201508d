"""Deployments, and the stored templates from which they are made again.

A template is rendered once and kept in a ControllerRevision, so upgrades and repairs roll nothing.
"""

from __future__ import annotations

from tandem.operator.desired.facts import Facts, once
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.references import secrets_note
from tandem.operator.desired.revision import in_order
from tandem.operator.desired.router import router_template
from tandem.operator.desired.worker import worker_template
from tandem.protocol import names

RevisionKey = tuple[Role, str]


@once
def rendered(facts: Facts, role: Role) -> Manifest:
    """Return the template of the spec's revision. Raises TemplateConflict."""
    return router_template(facts) if role is Role.ROUTER else worker_template(facts, role)


def stored_template(facts: Facts, role: Role, revision: str, template: Manifest) -> Manifest:
    """Return the ControllerRevision of a template."""
    owner = facts.owner
    labels = {names.LABEL_ROLE: role, names.LABEL_REVISION: revision}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": owner.metadata(owner.child(role, revision), role, labels=labels),
        "revision": 1,
        "data": {"template": in_order(template)},
    }


def deployment(
    facts: Facts, role: Role, revision: str, replicas: int, template: Manifest
) -> Manifest:
    """Return the Deployment of one revision, which only the operator rolls."""
    owner = facts.owner
    labels = {names.LABEL_ROLE: role, names.LABEL_REVISION: revision}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(
            owner.child(role, revision), role, labels=labels, **secrets_note(owner, template)
        ),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": 2**31 - 1,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "selector": {"matchLabels": owner.selector(role, revision)},
            "template": template,
        },
    }
