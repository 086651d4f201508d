"""Access of pods to the API server: workers none, routers reads of their namespace's pods.

Pure; called by ``compose``.
"""

from __future__ import annotations

from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest, Role

_RBAC = "rbac.authorization.k8s.io"
ROUTER_RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
"""Rules of the routers' Role. RBAC cannot filter pods by label: this is the least."""


def service_accounts(facts: Facts) -> list[Manifest]:
    """Return one account for routers; one for workers and the model's Job, without a token."""
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
