"""The routers: Deployment, Service, and their account for watching pods."""

from __future__ import annotations

import json

from tandem.operator.api.roles import ServiceType
from tandem.operator.api.service import DisaggregationMode, LLMServiceSpec
from tandem.operator.api.transfer import FailurePolicy
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Identity, Manifest, Role
from tandem.operator.desired.pod import RolePart, pod_template
from tandem.operator.desired.policy import (
    MAX_STREAM_SECONDS,
    QUEUE_AGE_SECONDS,
    ROUTER_PRE_STOP,
    draws_tokens,
)
from tandem.operator.desired.tracing import sampling_env, tracing_env, tracing_flags
from tandem.protocol import names

_API_KEYS_VOLUME, _CANARY_VOLUME = "tandem-api-keys", "tandem-canary"
_ADMIN_API_KEYS_VOLUME = "tandem-admin-api-keys"


def router_template(facts: Facts) -> Manifest:
    """Return the pod template of routers. Raises TemplateConflict."""
    volumes, mounts = _secrets(facts)
    part = RolePart(
        command=["tandem"],
        args=router_arguments(facts),
        image=facts.settings.router_image,
        ports=_ports(facts),
        env=_env(facts),
        resources=facts.spec.router.resources,
        volumes=volumes,
        mounts=mounts,
        pre_stop={"sleep": {"seconds": ROUTER_PRE_STOP}},
        service_account=facts.owner.child(Role.ROUTER),
        mounts_token=True,
    )
    return pod_template(facts, Role.ROUTER, part, facts.spec.router.pod_template)


def router_arguments(facts: Facts) -> list[str]:
    """Return the router's command line."""
    spec = facts.spec
    stream = spec.router.max_stream_seconds or MAX_STREAM_SECONDS
    flags: dict[str, object] = {
        "host": facts.settings.listening_host,
        "port": names.ROUTER_PORT,
        "grpc-port": _ports(facts).get("grpc"),
        "model": facts.delivery.path,
        "request-timeout": stream,
        "drain-timeout": stream,
        **tracing_flags(spec),
    }
    if not draws_tokens(spec):
        flags["ready-decode"] = 0
    arguments = [str(Role.ROUTER)]
    for flag, value in flags.items():
        if value is not None:
            arguments += [f"--{flag}", str(value)]
    if spec.disaggregation.mode is DisaggregationMode.ALWAYS:
        arguments.append("--strict-handoff")
    for name in spec.model.served_names or [spec.model.name]:
        arguments += ["--served-model-name", name]
    return [*arguments, *spec.router.extra_args]


def _ports(facts: Facts) -> dict[str, int]:
    """Return the ports of a router's container by name."""
    grpc = {"grpc": names.GRPC_PORT} if facts.spec.router.service.grpc_port else {}
    return {"http": names.ROUTER_PORT, **grpc}


def _limits(spec: LLMServiceSpec) -> dict[str, int]:
    """Return the router's limits that the spec sets."""
    queue = spec.router.queue
    limits = {"max_queue_age": queue.max_age_seconds or QUEUE_AGE_SECONDS}
    if queue.max_tokens is not None:
        limits["max_queued_tokens"] = queue.max_tokens
    if spec.kv_transfer.failure_policy is FailurePolicy.FAIL:
        limits["max_attempts"] = 1
    return limits


def _env(facts: Facts) -> list[Manifest]:
    selector = {
        names.LABEL_SERVICE: facts.owner.name,
        names.LABEL_MODEL: facts.delivery.digest,
    }
    values = {
        names.ENV_DISCOVERY_SELECTOR: ",".join(f"{k}={v}" for k, v in selector.items()),
        names.ENV_CANARY_TOKEN_FILE: f"{names.PATH_CANARY}/{names.CANARY_TOKEN_FILE}",
        names.ENV_LIMITS: json.dumps(_limits(facts.spec)),
        **tracing_env(facts.spec),
        **sampling_env(facts.spec),
    }
    if facts.spec.router.auth.api_keys_secret_ref is not None:
        values[names.ENV_API_KEYS_DIR] = names.PATH_API_KEYS
    if facts.spec.router.auth.admin_keys_secret_ref is not None:
        values[names.ENV_ADMIN_API_KEYS_DIR] = names.PATH_ADMIN_API_KEYS
    return [{"name": name, "value": value} for name, value in values.items()]


def canary_secret(owner: Identity) -> str:
    """Return the name of the Secret with the canary's token."""
    return owner.secret("canary")


def canary_secret_of(template: Manifest) -> str | None:
    """Return the canary's Secret that a template of routers mounts."""
    for volume in template["spec"].get("volumes") or ():
        if volume["name"] == _CANARY_VOLUME:
            name: str | None = volume.get("secret", {}).get("secretName")
            return name
    return None


def _secrets(facts: Facts) -> tuple[list[Manifest], list[Manifest]]:
    auth = facts.spec.router.auth
    mounted = [(_CANARY_VOLUME, canary_secret(facts.owner), names.PATH_CANARY)]
    if (keys := auth.api_keys_secret_ref) is not None:
        mounted.append((_API_KEYS_VOLUME, keys.name, names.PATH_API_KEYS))
    if (keys := auth.admin_keys_secret_ref) is not None:
        mounted.append((_ADMIN_API_KEYS_VOLUME, keys.name, names.PATH_ADMIN_API_KEYS))
    volumes: list[Manifest] = [
        {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}
        for name, secret, _ in mounted
    ]
    mounts: list[Manifest] = [
        {"name": name, "mountPath": path, "readOnly": True} for name, _, path in mounted
    ]
    return volumes, mounts


def service(facts: Facts, revision: str | None = None) -> Manifest:
    """Return the Service for clients: all ready routers, or those of one revision."""
    owner, section = facts.owner, facts.spec.router.service
    metadata = owner.metadata(owner.name, Role.ROUTER)
    if section.annotations:
        metadata["annotations"] = section.annotations
    ports = [_service_port("http", service_port(facts), "http")]
    if section.grpc_port:
        ports.append(_service_port("grpc", section.grpc_port, "kubernetes.io/h2c"))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": str(section.type or ServiceType.CLUSTER_IP),
            "selector": owner.selector(Role.ROUTER, revision),
            "ports": ports,
        },
    }


def _service_port(name: str, port: int, protocol: str) -> Manifest:
    return {
        "name": name,
        "port": port,
        "targetPort": name,
        "protocol": "TCP",
        "appProtocol": protocol,
    }


def service_port(facts: Facts) -> int:
    """Return the port of the Service."""
    return facts.spec.router.service.port or names.ROUTER_PORT


def url(facts: Facts) -> str:
    """Return the URL for clients in the cluster."""
    return f"http://{facts.owner.name}.{facts.owner.namespace}.svc:{service_port(facts)}/v1"
