"""Defaults of a spec.

They are not in the CRD, which would write them into every object.
"""

from __future__ import annotations

from itertools import pairwise

from tandem.operator.api.roles import ScalingMode, WorkerSpec
from tandem.operator.api.service import (
    DisaggregationMode,
    DType,
    KVCacheDType,
    LLMServiceSpec,
    NetworkPolicyMode,
    PodSecurity,
    Task,
)
from tandem.operator.api.transfer import Connector, NodeLocalMode
from tandem.operator.desired.naming import Role
from tandem.protocol.names import PROBE_PORT, ROUTER_PORT

ROUTER_REPLICAS = 2
DRAIN_SECONDS = {Role.PREFILL: 60, Role.DECODE: 120}
GRACE_MARGIN = 15
"""Seconds of a grace period beyond the drain."""
ROUTER_PRE_STOP = 10
"""Seconds for load balancers to drop a leaving router."""
MAX_STREAM_SECONDS = 600
QUEUE_AGE_SECONDS = 60
PROGRESS_DEADLINE = 1200

CONNECTORS = {
    Connector.AUTO: "auto",
    Connector.NIXL: "nixl",
    Connector.TCP: "tcp",
    Connector.CUDA_P2P: "cuda_p2p",
}
DTYPES = {
    DType.AUTO: "auto",
    DType.FLOAT32: "float32",
    DType.BFLOAT16: "bfloat16",
    DType.FLOAT16: "float16",
}
KV_CACHE_DTYPES = {
    KVCacheDType.AUTO: "auto",
    KVCacheDType.FLOAT32: "float32",
    KVCacheDType.BFLOAT16: "bfloat16",
    KVCacheDType.FLOAT16: "float16",
    KVCacheDType.FP8: "fp8",
}


def worker_role(spec: LLMServiceSpec, role: Role) -> WorkerSpec:
    """Return the spec of a role of workers."""
    assert role is not Role.ROUTER
    return spec.prefill if role is Role.PREFILL else spec.decode


def task_of(spec: LLMServiceSpec) -> Task:
    """Return the task of the service."""
    return spec.task or Task.GENERATE


def draws_tokens(spec: LLMServiceSpec) -> bool:
    """Return whether tokens are generated, so that decode workers have work."""
    return task_of(spec) is Task.GENERATE


def router_value(spec: LLMServiceSpec, flag: str) -> str | None:
    """Return the last value of ``--flag`` in ``router.extraArgs``."""
    words = [word for given in spec.router.extra_args for word in given.split("=", 1)]
    return next((value for name, value in [*pairwise(words)][::-1] if name == f"--{flag}"), None)


def router_has(spec: LLMServiceSpec, flag: str) -> bool:
    """Return whether ``router.extraArgs`` sets a switch; the last of several counts."""
    given = [each for each in spec.router.extra_args if each in (f"--{flag}", f"--no-{flag}")]
    return given[-1:] == [f"--{flag}"]


def answering_role(spec: LLMServiceSpec) -> Role:
    """Return the role of the answering workers."""
    return Role.DECODE if draws_tokens(spec) else Role.PREFILL


def _has_no_work(spec: LLMServiceSpec, role: Role) -> bool:
    """Return whether a role of workers never has work."""
    if role is Role.DECODE:
        return not draws_tokens(spec)
    return role is Role.PREFILL and spec.disaggregation.mode is DisaggregationMode.NEVER


def asked_replicas(spec: LLMServiceSpec, role: Role) -> int:
    """Return the replicas in the spec, without scalers and suspension."""
    if role is Role.ROUTER:
        return ROUTER_REPLICAS if spec.router.replicas is None else spec.router.replicas
    if _has_no_work(spec, role):
        return 0
    replicas = worker_role(spec, role).replicas
    return 1 if replicas is None else replicas


def is_external(spec: LLMServiceSpec, role: Role) -> bool:
    """Return whether an LLMRoleScaler decides the replicas."""
    if role is Role.ROUTER or _has_no_work(spec, role):
        return False
    return worker_role(spec, role).scaling.mode is ScalingMode.EXTERNAL


def scaling_bounds(spec: LLMServiceSpec, role: Role) -> tuple[int, int]:
    """Return the minimum and maximum replicas of a scaler."""
    scaling = worker_role(spec, role).scaling
    always = role is Role.PREFILL and spec.disaggregation.mode is DisaggregationMode.ALWAYS
    floor = 1 if always or role is answering_role(spec) else 0
    low = max(floor, floor if scaling.min_replicas is None else scaling.min_replicas)
    high = 1000 if scaling.max_replicas is None else scaling.max_replicas
    return low, max(low, high)


def max_unavailable(spec: LLMServiceSpec, role: Role) -> int:
    """Return the replicas that a rollout or a node drain may take at once."""
    if role is Role.ROUTER:
        return 1
    return worker_role(spec, role).max_unavailable or 1


def drain_seconds(spec: LLMServiceSpec, role: Role) -> int:
    """Return the seconds for running requests after SIGTERM."""
    if role is Role.ROUTER:
        return spec.router.max_stream_seconds or MAX_STREAM_SECONDS
    return worker_role(spec, role).drain_timeout_seconds or DRAIN_SECONDS[role]


def grace_seconds(spec: LLMServiceSpec, role: Role) -> int:
    """Return terminationGracePeriodSeconds of a role's pods."""
    before = ROUTER_PRE_STOP if role is Role.ROUTER else 0
    return before + drain_seconds(spec, role) + GRACE_MARGIN


def probe_port(spec: LLMServiceSpec, role: Role) -> int:
    """Return the port of probes and metrics."""
    if role is Role.ROUTER:
        return ROUTER_PORT
    return spec.observability.metrics.port or PROBE_PORT


def is_restricted(spec: LLMServiceSpec) -> bool:
    """Return whether pods get the restricted profile's security context."""
    return spec.security.pod_security is not PodSecurity.UNMANAGED


def has_network_policies(spec: LLMServiceSpec) -> bool:
    """Return whether NetworkPolicies isolate the pods."""
    return spec.security.network_policy is not NetworkPolicyMode.DISABLED


def node_local_volume(spec: LLMServiceSpec) -> dict[str, object] | None:
    """Return the source of the volume that a node's pods share, or None."""
    local = spec.kv_transfer.node_local
    if local.mode is NodeLocalMode.DISABLED or local.volume is None:
        return None
    if local.volume.csi is not None:
        return {"csi": {"driver": local.volume.csi.driver}}
    claim = local.volume.persistent_volume_claim
    return None if claim is None else {"persistentVolumeClaim": {"claimName": claim.claim_name}}
