"""Deployments of prefill and decode workers: from the spec's fields to flags.

A Deployment of a role's revision has a fixed template; only its replicas change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tandem.operator.api.service import DisaggregationMode, LLMServiceSpec
from tandem.operator.api.transfer import Connector, KVTransfer, TransportChoice
from tandem.operator.desired.containers import worker_image
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.merge import MAIN, main_of
from tandem.operator.desired.naming import (
    Manifest,
    Role,
    map_of,
    maps_of,
)
from tandem.operator.desired.node_folder import node_folders
from tandem.operator.desired.pod import RolePart, pod_template
from tandem.operator.desired.policy import (
    CONNECTORS,
    DTYPES,
    KV_CACHE_DTYPES,
    drain_seconds,
    draws_tokens,
    node_local_volume,
    probe_port,
    router_has,
    router_value,
    worker_role,
)
from tandem.operator.desired.tracing import tracing_env, tracing_flags
from tandem.protocol import names
from tandem.protocol.messages import TARGET_ITL_MS, step_bound
from tandem.protocol.names import ENV_PREFIX


def step_bound_flags(spec: LLMServiceSpec, role: Role) -> list[str]:
    """Return ``--max-itl-ms`` for a GPU role without its own bound.

    None for strict hand-off, or if the router refuses its target.
    """
    fixed = (DisaggregationMode.NEVER, DisaggregationMode.ALWAYS)
    if spec.disaggregation.mode in fixed or not draws_tokens(spec):
        return []
    section = worker_role(spec, role)
    if router_has(spec, "strict-handoff") or not _has_gpu(section.resources):
        return []
    flags = _settings_of([*spec.engine.extra_args, *section.extra_args])
    try:
        target = float(router_value(spec, "target-itl-ms") or TARGET_ITL_MS)
    except ValueError:
        return []
    if not 0 < target < math.inf:
        return []
    return step_bound(target, {*flags, *_settings_in(section.pod_template or {})})


def _has_gpu(resources: Manifest | None) -> bool:
    """Return whether a container requests a GPU."""
    wanted = resources or {}
    names = (*map_of(wanted.get("limits")), *map_of(wanted.get("requests")))
    return bool(wanted.get("claims")) or any("gpu" in name for name in names)


def _settings_of(words: Sequence[str]) -> Iterator[str]:
    """Return the settings whose flags are among the words."""
    return (each[2:].split("=", 1)[0].replace("-", "_") for each in words if each[:2] == "--")


def _settings_in(template: Manifest) -> Iterator[str]:
    """Return the settings in a podTemplate's variables."""
    for container in maps_of(map_of(template.get("spec")).get("containers")):
        if container.get("name") != MAIN:
            continue
        names = (str(each.get("name")) for each in maps_of(container.get("env")))
        yield from (
            each.removeprefix(ENV_PREFIX).lower() for each in names if each.startswith(ENV_PREFIX)
        )


_PROBE_PORT = "http-metrics"
_UCX_TLS = {
    TransportChoice.TCP: "tcp,cuda_copy,self",
    TransportChoice.RDMA: "rc,cuda_copy,cuda_ipc,self",
}
"""UCX transports by choice; by default UCX may use TCP."""


def worker_template(facts: Facts, role: Role) -> Manifest:
    """Return the pod template of a role. Raises TemplateConflict."""
    spec = facts.spec
    section = worker_role(spec, role)
    volumes, mounts = node_folders(facts)
    part = RolePart(
        command=["tandem"],
        args=worker_arguments(facts, role),
        image=worker_image(spec, facts),
        ports=_ports(facts, role),
        env=_env(facts),
        resources=section.resources,
        volumes=[*volumes, {"name": "tandem-shm", "emptyDir": {"medium": "Memory"}}],
        mounts=[*mounts, {"name": "tandem-shm", "mountPath": "/dev/shm"}],
        service_account=facts.owner.child("worker"),
    )
    return pod_template(facts, role, part, section.pod_template)


def _ports(facts: Facts, role: Role) -> dict[str, int]:
    ports = {"zmq": names.WORKER_PORT, _PROBE_PORT: probe_port(facts.spec, role)}
    if role is Role.PREFILL or facts.spec.kv_transfer.pull_peers:
        ports |= {"kv-control": names.CONTROL_PORT, "kv-data": names.DATA_PORT}
    return ports


def kept_probe_port(template: Manifest) -> int | None:
    """Return the probe port of an existing worker template, or None."""
    ports = main_of(template).get("ports") or ()
    return next((each["containerPort"] for each in ports if each.get("name") == _PROBE_PORT), None)


def worker_arguments(facts: Facts, role: Role) -> list[str]:
    """Return the worker's command line."""
    given = {
        **_shell_flags(facts, role),
        **_engine_flags(facts, role),
        **_transfer_flags(facts),
        **tracing_flags(facts.spec),
    }
    arguments = [str(role)]
    for flag, value in given.items():
        if value is not None:
            arguments += [f"--{flag}", str(value)]
    extra = [*facts.spec.engine.extra_args, *worker_role(facts.spec, role).extra_args]
    return [*arguments, *step_bound_flags(facts.spec, role), *extra]


Flags = dict[str, object]


def _shell_flags(facts: Facts, role: Role) -> Flags:
    return {
        "model": facts.delivery.path,
        "served-model-name": facts.spec.model.name,
        "host": facts.settings.listening_host,
        "port": names.WORKER_PORT,
        "probe-port": probe_port(facts.spec, role),
        "drain-seconds": drain_seconds(facts.spec, role),
    }


def _engine_flags(facts: Facts, role: Role) -> Flags:
    engine = facts.spec.engine
    share, kv_type = engine.gpu_memory_utilization_percent, engine.kv_cache_dtype
    return {
        "dtype": None if engine.dtype is None else DTYPES[engine.dtype],
        "kv-cache-dtype": None if kv_type is None else KV_CACHE_DTYPES[kv_type],
        "max-model-len": engine.max_model_len,
        "block-size": engine.block_size,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "gpu-memory-utilization": None if share is None else share / 100,
        "tensor-parallel-size": worker_role(facts.spec, role).parallelism.tensor,
    }


def _transfer_flags(facts: Facts) -> Flags:
    transfer = facts.spec.kv_transfer
    meets = node_local_volume(facts.spec) is not None
    copies = transfer.node_local.copy_mode if meets else None
    return {
        "kv-connector": _connector(transfer, meets=meets),
        "kv-control-host": facts.settings.listening_host,
        "kv-control-port": names.CONTROL_PORT,
        "kv-advertise-host": f"$({names.ENV_POD_IP})",
        "kv-data-port": names.DATA_PORT,
        "kv-lease-seconds": transfer.lease_duration_seconds,
        "kv-pull-peers": transfer.pull_peers,
        "kv-node-folder": names.PATH_NODE if meets else None,
        "kv-node-copy": None if copies is None else copies.lower(),
    }


def _connector(transfer: KVTransfer, *, meets: bool) -> str | None:
    """Return the connector's name.

    NIXL for RDMA alone, as ``auto`` may use TCP; ``auto`` in a node's folder.
    """
    choice = transfer.connector
    open_choice = choice in (None, Connector.AUTO)
    if open_choice and transfer.transport is TransportChoice.RDMA and not meets:
        choice = Connector.NIXL
    return None if choice is None else CONNECTORS[choice]


def _env(facts: Facts) -> list[Manifest]:
    last = names.DATA_PORT + names.DATA_PORTS - 1
    values = {
        "UCX_TCP_PORT_RANGE": f"{names.DATA_PORT}-{last}",
        "HF_HUB_OFFLINE": "1",
        **tracing_env(facts.spec),
    }
    choice = facts.spec.kv_transfer.transport
    if choice in _UCX_TLS:
        values["UCX_TLS"] = _UCX_TLS[choice]
    return [{"name": name, "value": value} for name, value in values.items()]
