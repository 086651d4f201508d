"""The pod template of all roles: identity, keys, probes, security profile.

Roles add arguments, ports and variables; the user's podTemplate is merged last.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.operator.desired import model as models
from tandem.operator.desired.baseline import beyond_baseline
from tandem.operator.desired.containers import (
    container_extras,
    scratch_env,
    scratch_mounts,
    scratch_volumes,
    with_extras,
)
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.fetching import fetch_container, without_job
from tandem.operator.desired.merge import MAIN, merged
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.node_folder import check_node_folders
from tandem.operator.desired.policy import grace_seconds, is_restricted, probe_port
from tandem.operator.desired.protect import TemplateConflict, check_protected
from tandem.protocol import names
from tandem.protocol.card import WIRE

_LEAVE_DEAD_NODE = 30
"""Seconds after which pods of a dead node are replaced."""
_STATES = ("not-ready", "unreachable")


def with_gone_nodes(given: Any) -> Any:
    """Return tolerations with those of lost nodes, unless ``given`` covers them."""
    if given is None:
        given = []
    if not isinstance(given, list):
        return given
    return [*given, *(own for state in _STATES if not _named(own := _gone(state), given))]


def _named(own: Manifest, given: list[Any]) -> bool:
    return any(
        (each.get("key") or own["key"]) == own["key"]
        and (each.get("effect") or own["effect"]) == own["effect"]
        for each in given
        if isinstance(each, dict)
    )


def _gone(state: str) -> Manifest:
    return {
        "key": f"node.kubernetes.io/{state}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": _LEAVE_DEAD_NODE,
    }


SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""Annotation by which an autoscaler may remove pods with scratch volumes."""
USER = 65532
_KEYS_VOLUME, _PEERS_VOLUME = "tandem-keys", "tandem-peers"
_BEYOND = (
    "this exceeds the baseline Pod Security profile, the maximum of an LLMService "
    "(--allow-privileged-pods of the operator permits it)"
)
LOADING_SECONDS = 3600
"""Seconds that a startup probe allows for loading a model."""


class RolePart(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a role in the template."""

    command: list[str]
    args: list[str]
    image: str
    ports: dict[str, int]
    env: list[Manifest]
    ready_path: str = "/ready"
    resources: dict[str, Any] | None = None
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    pre_stop: Manifest | None = None
    service_account: str = ""
    mounts_token: bool = False


def pod_template(facts: Facts, role: Role, part: RolePart, user: Manifest | None) -> Manifest:
    """Return the template of a role's pods.

    Raises TemplateConflict for a protected field or one beyond the baseline profile,
    TemplateUnreadable for a wrong kind.
    """
    own = _template(facts, role, part)
    base = with_extras(facts.spec, facts.settings, own)
    if not user:
        return base
    field = f"spec.{role}.podTemplate"
    if not facts.delivery.in_pods:
        user = without_job(facts, role, user)
    result: Manifest = merged(base, user, path=field)
    check_protected(own, result, field=field)
    check_node_folders(own, result, field=field)
    result["spec"]["tolerations"] = with_gone_nodes(result["spec"].get("tolerations"))
    beyond = None if facts.settings.allow_privileged_pods else beyond_baseline(result["spec"])
    if beyond is not None:
        raise TemplateConflict(f"{field}.spec.{beyond}", _BEYOND)
    return result


def _template(facts: Facts, role: Role, part: RolePart) -> Manifest:
    spec, revision = facts.spec, facts.revision(role)
    labels = facts.owner.pod_labels(role, revision, facts.delivery.digest)
    where = facts.delivery
    pod: Manifest = {
        "serviceAccountName": part.service_account,
        "automountServiceAccountToken": part.mounts_token,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds(spec, role),
        "containers": [_main(facts, role, part)],
        "volumes": [*_volumes(facts, role), *part.volumes, where.volume],
        "tolerations": with_gone_nodes(None),
    }
    if role is Role.ROUTER:
        pod["topologySpreadConstraints"] = [_spread(facts, revision)]
    if is_restricted(spec):
        pod["securityContext"] = pod_security()
    if where.in_pods:
        pod["initContainers"] = [fetch_container(facts, role)]
    return {"metadata": {"labels": labels, "annotations": _annotations()}, "spec": pod}


def _spread(facts: Facts, revision: str) -> Manifest:
    """Return the constraint that spreads routers of a revision over nodes, if possible."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": facts.owner.selector(Role.ROUTER, revision)},
    }


def _annotations() -> dict[str, str]:
    return {
        "kubectl.kubernetes.io/default-container": MAIN,
        names.ANNOTATION_WIRE: WIRE,
        SAFE_TO_EVICT: "true",
    }


def _main(facts: Facts, role: Role, part: RolePart) -> Manifest:
    where = facts.delivery
    container: Manifest = {
        "name": MAIN,
        "image": part.image,
        "command": part.command,
        "args": part.args,
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in part.ports.items()
        ],
        "env": [*identity_env(facts, role), *part.env],
        "volumeMounts": [*_mounts(), *part.mounts, *models.mounts(where, fetching=False)],
        **_probes(probe_port(facts.spec, role), part.ready_path),
    }
    if part.resources is not None:
        container["resources"] = part.resources
    if part.pre_stop is not None:
        container["lifecycle"] = {"preStop": part.pre_stop}
    return container | container_extras(facts)


def pod_security() -> Manifest:
    """Return the restricted profile."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def identity_env(facts: Facts, role: Role) -> list[Manifest]:
    """Return the variables of identity, key folders, and home."""
    fields = {
        names.ENV_POD_NAME: "metadata.name",
        names.ENV_POD_UID: "metadata.uid",
        names.ENV_POD_NAMESPACE: "metadata.namespace",
        names.ENV_POD_IP: "status.podIP",
        names.ENV_NODE_NAME: "spec.nodeName",
    }
    values = {
        names.ENV_SERVICE: facts.owner.name,
        names.ENV_ROLE_REVISION: facts.revision(role),
        names.ENV_CURVE_KEYS: names.PATH_CURVE_KEYS,
        names.ENV_CURVE_PEERS: names.PATH_CURVE_PEERS,
        **scratch_env(),
    }
    env: list[Manifest] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    return env + [{"name": name, "value": value} for name, value in values.items()]


def keys_secret(facts: Facts, role: Role) -> str:
    """Return the name of the Secret with a role's key pair."""
    return f"{facts.owner.secret(role, 'keys')}-g{facts.key_generation}"


def _volumes(facts: Facts, role: Role) -> list[Manifest]:
    keys = {"secretName": keys_secret(facts, role), "defaultMode": 0o440}
    return [
        {"name": _KEYS_VOLUME, "secret": keys},
        {"name": _PEERS_VOLUME, "configMap": {"name": facts.owner.child("peers")}},
        *scratch_volumes(),
    ]


def _mounts() -> list[Manifest]:
    return [
        {"name": _KEYS_VOLUME, "mountPath": names.PATH_CURVE_KEYS, "readOnly": True},
        {"name": _PEERS_VOLUME, "mountPath": names.PATH_CURVE_PEERS, "readOnly": True},
        *scratch_mounts(),
    ]


def _probes(port: int, ready_path: str) -> Manifest:
    ready = {"httpGet": {"path": ready_path, "port": port}, "timeoutSeconds": 5}
    health = {"httpGet": {"path": "/health", "port": port}, "timeoutSeconds": 5}
    return {
        "startupProbe": {**health, "periodSeconds": 1, "failureThreshold": LOADING_SECONDS},
        "readinessProbe": {**ready, "periodSeconds": 1, "failureThreshold": 3},
        "livenessProbe": {**health, "periodSeconds": 10, "failureThreshold": 6},
    }
