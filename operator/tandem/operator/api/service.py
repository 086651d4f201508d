"""``LLMService.spec`` as a whole, with the parts outside of roles."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import field

from tandem.operator.api.model import Model
from tandem.operator.api.roles import Router, WorkerSpec
from tandem.operator.api.status import LLMServiceStatus
from tandem.operator.api.transfer import KVTransfer
from tandem.operator.api.values import (
    AnnotationMap,
    Api,
    Arguments,
    Count,
    Image,
    LabelMap,
    Percent,
    PortNumber,
    PullSecrets,
    Seconds,
    ShortText,
    Url,
    doc,
)
from tandem.protocol.errors import TandemError


class DType(StrEnum):
    """Type of numbers."""

    AUTO = "Auto"
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"


class KVCacheDType(StrEnum):
    """Type of keys and values."""

    AUTO = "Auto"
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FP8 = "FP8"


class Engine(Api, frozen=True, kw_only=True):
    """Settings that both roles share; any change is a new revision."""

    dtype: Annotated[
        DType | None, doc("Type of weights and activations. Auto: the checkpoint's.")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType | None,
        doc("Type of KV: Auto, FP8 (e4m3), or the value of dtype. Workers refuse others."),
    ] = None
    max_model_len: Annotated[
        Count | None, doc("Maximum tokens of prompt and output. Default: the model's maximum.")
    ] = None
    block_size: Annotated[
        Count | None, doc("Tokens of a KV block: a power of two from 16 to 256.")
    ] = None
    max_num_seqs: Annotated[Count | None, doc("Maximum sequences in one step.")] = None
    max_num_batched_tokens: Annotated[Count | None, doc("Maximum tokens in one step.")] = None
    gpu_memory_utilization_percent: Annotated[
        Percent | None, doc("Share of a GPU's memory for weights, activations and KV. Default: 90.")
    ] = None
    extra_args: Annotated[
        Arguments, doc("Additional flags of every worker; see tandem prefill --help.")
    ] = field(default_factory=list)


class Task(StrEnum):
    """Kind of requests that a service answers."""

    GENERATE = "Generate"
    EMBED = "Embed"
    CLASSIFY = "Classify"
    SCORE = "Score"


class DisaggregationMode(StrEnum):
    """Choice of computing prompts apart from decoding."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Disaggregation(Api, frozen=True, kw_only=True):
    """Choice of computing prompts apart from decoding."""

    mode: Annotated[
        DisaggregationMode | None,
        doc(
            "Auto (default): the router's cost model decides. Always: hand off every prompt. "
            "Never: decode workers compute prompts."
        ),
    ] = None


class StrategyType(StrEnum):
    """Replacement of an old revision by a new one."""

    ROLLING_UPDATE = "RollingUpdate"


class Strategy(Api, frozen=True, kw_only=True):
    """Replacement of an old revision by a new one."""

    type: Annotated[StrategyType | None, doc("RollingUpdate is the only type.")] = None


class Surge(StrEnum):
    """Permission of a rollout to use more devices than the service has."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class OnFailure(StrEnum):
    """Reaction to a revision that does not become Servable in time."""

    STOP = "Stop"


class Rollout(Api, frozen=True, kw_only=True):
    """Rollout of changes to pods."""

    strategy: Annotated[Strategy, doc("Replacement of the old revision.")] = field(
        default_factory=Strategy
    )
    surge: Annotated[
        Surge | None,
        doc(
            "Auto (default): one additional replica during a rollout, or in place if it cannot "
            "be scheduled. Always: additional. Never: in place."
        ),
    ] = None
    progress_deadline_seconds: Annotated[
        Seconds | None, doc("Time without progress after which a rollout fails. Default: 1200.")
    ] = None
    on_failure: Annotated[
        OnFailure | None, doc("Stop: restore the replicas of the old revision.")
    ] = None
    paused: Annotated[bool | None, doc("Keep the replicas of both revisions.")] = None
    restart_id: Annotated[ShortText | None, doc("A change replaces all pods in a rollout.")] = (
        field(default=None, name="restartID")
    )


class NetworkPolicyMode(StrEnum):
    """Management of the pods' NetworkPolicies."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class PodSecurity(StrEnum):
    """Which Pod Security profile the pods fit."""

    RESTRICTED = "Restricted"
    UNMANAGED = "Unmanaged"


class Security(Api, frozen=True, kw_only=True):
    """Access to the pods, and privileges of the pods."""

    network_policy: Annotated[NetworkPolicyMode | None, doc("Enabled (default) or Disabled.")] = (
        None
    )
    pod_security: Annotated[
        PodSecurity | None,
        doc("Restricted (default), or Unmanaged: podTemplate sets security contexts."),
    ] = None
    key_rotation_id: Annotated[
        ShortText | None, doc("A change creates new CURVE keys and replaces all pods.")
    ] = field(default=None, name="keyRotationID")


class Metrics(Api, frozen=True, kw_only=True):
    """Port of the workers' probes and metrics."""

    port: Annotated[
        PortNumber | None, doc("HTTP port of workers for probes and metrics. Default: 8001.")
    ] = None


class Tracing(Api, frozen=True, kw_only=True):
    """Destination of spans."""

    endpoint: Annotated[
        Url | None,
        doc("URL of an OTLP receiver: HTTP with port 4318 or a path, else gRPC. Default: off."),
    ] = None
    sample_percent: Annotated[
        Percent | None,
        doc("Share of requests to trace, if they are not part of a trace. Default: 0."),
    ] = None


class Observability(Api, frozen=True, kw_only=True):
    """Metrics and traces."""

    metrics: Annotated[Metrics, doc("Prometheus metrics of workers.")] = field(
        default_factory=Metrics
    )
    tracing: Annotated[Tracing, doc("OpenTelemetry traces.")] = field(default_factory=Tracing)


class LLMServiceSpec(Api, frozen=True, kw_only=True):
    """Desired state of a service."""

    model: Annotated[Model, doc("Served model and the source of its files.")]
    task: Annotated[
        Task | None,
        doc(
            "Generate (default): tokens. Embed, Classify, Score: vectors, classes and scores, "
            "from prefill workers only. The canary uses the same task."
        ),
    ] = None
    decode: Annotated[
        WorkerSpec,
        doc(
            "Workers that generate tokens. They can serve whole requests. At least one "
            "replica, but 0 for a task without tokens."
        ),
    ] = field(default_factory=WorkerSpec)
    suspend: Annotated[
        bool | None, doc("Scale routers and workers to zero, and keep all other objects.")
    ] = None
    image: Annotated[Image | None, doc("Worker image. Default: the operator release's image.")] = (
        None
    )
    image_pull_secrets: Annotated[
        PullSecrets,
        doc(
            "Pull secrets of all pods and of the model Job. Default: the operator's "
            "--service-pull-secrets. A podTemplate adds its own."
        ),
    ] = field(default_factory=list)
    labels: Annotated[
        LabelMap,
        doc(
            "Labels of all children and pods. A podTemplate's labels take precedence. A change "
            "is a new revision of all roles."
        ),
    ] = field(default_factory=dict)
    annotations: Annotated[
        AnnotationMap,
        doc(
            "Annotations of all children and pods. A podTemplate's annotations take "
            "precedence. A change is a new revision of all roles."
        ),
    ] = field(default_factory=dict)
    engine: Annotated[Engine, doc("Settings of all workers. A change is a new revision.")] = field(
        default_factory=Engine
    )
    kv_transfer: Annotated[KVTransfer, doc("Transfer of KV from prefill to decode workers.")] = (
        field(default_factory=KVTransfer)
    )
    prefill: Annotated[
        WorkerSpec,
        doc("Workers that compute prompts and transfer their KV. 0 replicas: aggregated serving."),
    ] = field(default_factory=WorkerSpec)
    disaggregation: Annotated[
        Disaggregation, doc("Choice of separate prefill workers for a prompt.")
    ] = field(default_factory=Disaggregation)
    router: Annotated[Router, doc("Pods of the OpenAI HTTP server.")] = field(
        default_factory=Router
    )
    rollout: Annotated[Rollout, doc("Rollout of changes.")] = field(default_factory=Rollout)
    security: Annotated[Security, doc("Network policies, Pod Security and keys.")] = field(
        default_factory=Security
    )
    observability: Annotated[Observability, doc("Metrics and traces.")] = field(
        default_factory=Observability
    )


_BUILT = (msgspec.json.Decoder(LLMServiceSpec), msgspec.json.Decoder(LLMServiceStatus))


class Unreadable(TandemError, ValueError):
    """The spec does not fit this version's types; the message names the field."""


def spec_of(resource: dict[str, Any]) -> LLMServiceSpec:
    """Return the spec of an LLMService. Raises Unreadable."""
    if "spec" not in resource:
        raise Unreadable("spec: it is missing")
    try:
        return msgspec.convert(resource["spec"], LLMServiceSpec)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at ")
        field = "spec" + place.strip("`").removeprefix("$")
        raise Unreadable(f"{field}: {text}") from error


def status_of(resource: dict[str, Any]) -> LLMServiceStatus:
    """Return the status; an empty one if it cannot be read."""
    try:
        return msgspec.convert(resource.get("status") or {}, LLMServiceStatus)
    except msgspec.ValidationError:
        return LLMServiceStatus()
