"""``spec.prefill``, ``spec.decode`` and ``spec.router``: how many pods of what shape."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import field

from tandem.operator.api.values import (
    Api,
    Arguments,
    Count,
    Degree,
    PodTemplate,
    PortNumber,
    Replicas,
    Resources,
    Seconds,
    SecretRef,
    StringMap,
    doc,
)

_TEMPLATE = (
    "Pod template merged over the operator's (strategic merge by Kubernetes' keys). The container "
    "named main is Tandem's; others pass through. Labels, account, keys, identity, probes and "
    "security contexts of Tandem's are protected, pods stay within the baseline profile, and "
    "Secrets need the label tandem.dev/llmservices=allowed."
)


class ScalingMode(StrEnum):
    """Owner of a role's replica count."""

    MANUAL = "Manual"
    EXTERNAL = "External"


class Scaling(Api, frozen=True, kw_only=True):
    """Scaling of a role and its bounds."""

    mode: Annotated[
        ScalingMode | None,
        doc(
            "Manual: replicas is what the role has. External: an LLMRoleScaler with /scale is made "
            "for HPA or KEDA, and replicas only seeds it."
        ),
    ] = None
    min_replicas: Annotated[Replicas | None, doc("Fewest replicas an external scaler gets.")] = None
    max_replicas: Annotated[Replicas | None, doc("Most replicas an external scaler gets.")] = None


class Parallelism(Api, frozen=True, kw_only=True):
    """Devices of one model replica."""

    tensor: Annotated[Degree | None, doc("Ranks that share each layer (1 unless given).")] = None
    pipeline: Annotated[Degree | None, doc("Stages of layers (1 unless given).")] = None
    data: Annotated[Degree | None, doc("Copies that step together (1 unless given).")] = None


class WorkerSpec(Api, frozen=True, kw_only=True):
    """One role of workers; prefill and decode have the same fields."""

    replicas: Annotated[
        Replicas | None, doc("Model replicas of the role, not pods or devices (1 unless given).")
    ] = None
    scaling: Annotated[Scaling, doc("Who scales the role.")] = field(default_factory=Scaling)
    parallelism: Annotated[Parallelism, doc("How one replica is spread over devices.")] = field(
        default_factory=Parallelism
    )
    nodes_per_replica: Annotated[
        Degree | None, doc("Nodes that one replica spans (1 unless given).")
    ] = None
    resources: Annotated[
        Resources | None,
        doc("Requests, limits and claims of the container main, for instance nvidia.com/gpu."),
    ] = None
    extra_args: Annotated[
        Arguments, doc("Further flags of the worker, after those of engine.extraArgs.")
    ] = field(default_factory=list)
    drain_timeout_seconds: Annotated[
        Seconds | None,
        doc("Time that running requests get after SIGTERM (prefill 60, decode 120 unless given)."),
    ] = None
    max_unavailable: Annotated[
        Count | None,
        doc("Replicas that a rollout or a node drain may take at once (1 unless given)."),
    ] = None
    pod_template: Annotated[PodTemplate | None, doc(_TEMPLATE)] = None


class ServiceType(StrEnum):
    """Kubernetes' Service types that make sense for the router."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RouterService(Api, frozen=True, kw_only=True):
    """The Service that clients use."""

    type: Annotated[
        ServiceType | None, doc("ClusterIP (unless given), NodePort or LoadBalancer.")
    ] = None
    port: Annotated[PortNumber | None, doc("Port of the Service (8000 unless given).")] = None
    grpc_port: Annotated[
        PortNumber | None,
        doc("Port of the Service for gRPC (none unless given: routers speak HTTP alone)."),
    ] = None
    annotations: Annotated[
        StringMap, doc("Annotations of the Service, for instance of a load balancer.")
    ] = field(default_factory=dict)


class RouterAuth(Api, frozen=True, kw_only=True):
    """Keys of clients."""

    api_keys_secret_ref: Annotated[
        SecretRef | None,
        doc("Secret whose values are the accepted API keys; keys may change at any time."),
    ] = None
    admin_keys_secret_ref: Annotated[
        SecretRef | None,
        doc(
            "Secret whose values are keys of administration (/sleep, /server_info and their like); "
            "they open everything else too, and may change at any time. None: no such key."
        ),
    ] = None


class RouterQueue(Api, frozen=True, kw_only=True):
    """Limits of the queue in front of the workers."""

    max_tokens: Annotated[
        Count | None, doc("Prompt tokens that may wait in one router; beyond it: HTTP 429.")
    ] = None
    max_age_seconds: Annotated[
        Seconds | None, doc("A request that waited this long gets HTTP 503 (60 unless given).")
    ] = None


class Router(Api, frozen=True, kw_only=True):
    """The role that speaks HTTP and gRPC."""

    replicas: Annotated[Replicas | None, doc("Router pods (2 unless given).")] = None
    service: Annotated[RouterService, doc("The Service in front of the routers.")] = field(
        default_factory=RouterService
    )
    auth: Annotated[RouterAuth, doc("API keys and administration keys.")] = field(
        default_factory=RouterAuth
    )
    queue: Annotated[RouterQueue, doc("Limits of the waiting line.")] = field(
        default_factory=RouterQueue
    )
    max_stream_seconds: Annotated[
        Seconds | None,
        doc("Deadline of a request; a leaving router waits this long for streams (600)."),
    ] = None
    extra_args: Annotated[Arguments, doc("Further flags of the router.")] = field(
        default_factory=list
    )
    resources: Annotated[
        Resources | None, doc("Requests, limits and claims of the container main.")
    ] = None
    pod_template: Annotated[PodTemplate | None, doc(_TEMPLATE)] = None
