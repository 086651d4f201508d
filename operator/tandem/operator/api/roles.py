"""``spec.prefill``, ``spec.decode`` and ``spec.router``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import field

from tandem.operator.api.values import (
    Api,
    Arguments,
    Count,
    Degree,
    DnsLabel,
    PodTemplate,
    PortNumber,
    Replicas,
    Resources,
    Seconds,
    SecretRef,
    StringMap,
    doc,
)


class ScaledRole(StrEnum):
    """Roles that can be scaled from outside."""

    PREFILL = "Prefill"
    DECODE = "Decode"


class LLMRoleScalerSpec(Api, frozen=True, kw_only=True):
    """Which role, and how many replicas it shall have."""

    service_name: Annotated[DnsLabel, doc("LLMService whose role is scaled.")]
    role: Annotated[ScaledRole, doc("Prefill or Decode.")]
    replicas: Annotated[Replicas, doc("Requested replicas, within the service's bounds.")]


class LLMRoleScalerStatus(Api, frozen=True, kw_only=True):
    """Status that /scale shows."""

    replicas: Annotated[Replicas | None, doc("Current replicas.")] = None
    selector: Annotated[
        str | None, doc("Label selector of the role's pods, for the autoscaler's metrics.")
    ] = None
    observed_replicas: Annotated[
        Replicas | None, doc("Requested replicas at the last reconcile pass.")
    ] = None


_TEMPLATE = (
    "Pod template, merged into the operator's by Kubernetes' strategic merge. Container main "
    "is Tandem's; others are added. Tandem's labels, account, keys, identity, probes and "
    "security contexts are protected. Pods must fit the baseline profile. Secrets require the "
    "label tandem.dev/llmservices=allowed."
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
            "Manual: replicas sets the number. External: the operator creates an LLMRoleScaler "
            "with /scale for HPA or KEDA, and replicas is its initial value."
        ),
    ] = None
    min_replicas: Annotated[Replicas | None, doc("Minimum replicas with an external scaler.")] = (
        None
    )
    max_replicas: Annotated[Replicas | None, doc("Maximum replicas with an external scaler.")] = (
        None
    )


class Parallelism(Api, frozen=True, kw_only=True):
    """Devices of one model replica."""

    tensor: Annotated[Degree | None, doc("Tensor parallel ranks. Default: 1.")] = None
    pipeline: Annotated[Degree | None, doc("Pipeline stages. Default: 1.")] = None
    data: Annotated[Degree | None, doc("Data parallel copies. Default: 1.")] = None


class WorkerSpec(Api, frozen=True, kw_only=True):
    """One role of workers; prefill and decode have the same fields."""

    replicas: Annotated[
        Replicas | None, doc("Model replicas of the role, not pods or devices. Default: 1.")
    ] = None
    scaling: Annotated[Scaling, doc("Scaling of the role.")] = field(default_factory=Scaling)
    parallelism: Annotated[Parallelism, doc("Devices of one replica.")] = field(
        default_factory=Parallelism
    )
    nodes_per_replica: Annotated[Degree | None, doc("Nodes of one replica. Default: 1.")] = None
    resources: Annotated[
        Resources | None,
        doc("Requests, limits and claims of container main, for example nvidia.com/gpu."),
    ] = None
    extra_args: Annotated[
        Arguments, doc("Additional flags of the worker, after those of engine.extraArgs.")
    ] = field(default_factory=list)
    drain_timeout_seconds: Annotated[
        Seconds | None,
        doc("Time for running requests after SIGTERM. Default: prefill 60, decode 120."),
    ] = None
    max_unavailable: Annotated[
        Count | None,
        doc("Replicas that a rollout or a node drain may stop at once. Default: 1."),
    ] = None
    pod_template: Annotated[PodTemplate | None, doc(_TEMPLATE)] = None


class ServiceType(StrEnum):
    """Kubernetes' Service types that make sense for the router."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RouterService(Api, frozen=True, kw_only=True):
    """The Service that clients use."""

    type: Annotated[ServiceType | None, doc("ClusterIP (default), NodePort or LoadBalancer.")] = (
        None
    )
    port: Annotated[PortNumber | None, doc("Port of the Service. Default: 8000.")] = None
    grpc_port: Annotated[
        PortNumber | None,
        doc("Port of the Service for gRPC. Default: no gRPC."),
    ] = None
    annotations: Annotated[
        StringMap, doc("Annotations of the Service, for example for a load balancer.")
    ] = field(default_factory=dict)


class RouterAuth(Api, frozen=True, kw_only=True):
    """Keys of clients."""

    api_keys_secret_ref: Annotated[
        SecretRef | None,
        doc("Secret whose values are the accepted API keys. Changes take effect at once."),
    ] = None
    admin_keys_secret_ref: Annotated[
        SecretRef | None,
        doc(
            "Secret whose values are administration keys (/sleep, /server_info and others). "
            "They are API keys too. Changes take effect at once. Default: none."
        ),
    ] = None


class RouterQueue(Api, frozen=True, kw_only=True):
    """Limits of the queue in front of the workers."""

    max_tokens: Annotated[
        Count | None, doc("Maximum queued prompt tokens of a router. Beyond it: HTTP 429.")
    ] = None
    max_age_seconds: Annotated[
        Seconds | None, doc("Maximum wait of a request in the queue, then HTTP 503. Default: 60.")
    ] = None


class Router(Api, frozen=True, kw_only=True):
    """The role that speaks HTTP and gRPC."""

    replicas: Annotated[Replicas | None, doc("Router pods. Default: 2.")] = None
    service: Annotated[RouterService, doc("The Service in front of the routers.")] = field(
        default_factory=RouterService
    )
    auth: Annotated[RouterAuth, doc("API keys and administration keys.")] = field(
        default_factory=RouterAuth
    )
    queue: Annotated[RouterQueue, doc("Limits of the queue.")] = field(default_factory=RouterQueue)
    max_stream_seconds: Annotated[
        Seconds | None,
        doc("Deadline of a request, also for streams of a router that stops. Default: 600."),
    ] = None
    extra_args: Annotated[Arguments, doc("Additional flags of the router.")] = field(
        default_factory=list
    )
    resources: Annotated[
        Resources | None, doc("Requests, limits and claims of container main.")
    ] = None
    pod_template: Annotated[PodTemplate | None, doc(_TEMPLATE)] = None
