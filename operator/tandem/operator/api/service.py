"""``LLMService.spec`` as a whole, with the parts that belong to no role."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import field

from tandem.operator.api.model import Model
from tandem.operator.api.roles import Router, WorkerSpec
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


class DType(StrEnum):
    """Type of numbers."""

    AUTO = "Auto"
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"


class Engine(Api, frozen=True, kw_only=True):
    """Settings that both roles share; any change is a new revision."""

    dtype: Annotated[
        DType | None, doc("Type of weights and activations; Auto is the checkpoint's.")
    ] = None
    kv_cache_dtype: Annotated[
        DType | None, doc("Type of KV: Auto, or that of dtype; workers start with no other.")
    ] = None
    max_model_len: Annotated[
        Count | None, doc("Prompt and output tokens together; none is what the model can do.")
    ] = None
    block_size: Annotated[
        Count | None, doc("Tokens of a KV block, a power of two from 16 to 256.")
    ] = None
    max_num_seqs: Annotated[Count | None, doc("Sequences in one step, at most.")] = None
    max_num_batched_tokens: Annotated[Count | None, doc("Tokens in one step, at most.")] = None
    gpu_memory_utilization_percent: Annotated[
        Percent | None, doc("Share of a GPU's memory for weights, activations and KV (90).")
    ] = None
    extra_args: Annotated[
        Arguments, doc("Further flags of every worker, as tandem prefill --help lists them.")
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
            "Auto (unless given): the router's cost model decides. Always: every prompt that is "
            "long enough. Never: decode workers do both."
        ),
    ] = None


class StrategyType(StrEnum):
    """Replacement of an old revision by a new one."""

    ROLLING_UPDATE = "RollingUpdate"


class Strategy(Api, frozen=True, kw_only=True):
    """Replacement of an old revision by a new one."""

    type: Annotated[StrategyType | None, doc("RollingUpdate, the only one.")] = None


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

    strategy: Annotated[Strategy, doc("How a new revision replaces the old one.")] = field(
        default_factory=Strategy
    )
    surge: Annotated[
        Surge | None,
        doc(
            "Auto (unless given): one replica more while rolling, and in place when it cannot be "
            "scheduled. Always, Never."
        ),
    ] = None
    progress_deadline_seconds: Annotated[
        Seconds | None, doc("A rollout without progress for this long has failed (1200).")
    ] = None
    on_failure: Annotated[
        OnFailure | None, doc("Stop: the old revision's counts are restored.")
    ] = None
    paused: Annotated[bool | None, doc("Keep the counts of both revisions as they are.")] = None
    restart_id: Annotated[
        ShortText | None, doc("Change it to replace all pods, revision by revision.")
    ] = field(default=None, name="restartID")


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

    network_policy: Annotated[
        NetworkPolicyMode | None, doc("Enabled (unless given) or Disabled.")
    ] = None
    pod_security: Annotated[
        PodSecurity | None,
        doc("Restricted (unless given), or Unmanaged: security contexts are up to podTemplate."),
    ] = None
    key_rotation_id: Annotated[
        ShortText | None, doc("Change it to make new CURVE keys and replace all pods.")
    ] = field(default=None, name="keyRotationID")


class Metrics(Api, frozen=True, kw_only=True):
    """Port of the workers' probes and metrics."""

    port: Annotated[
        PortNumber | None, doc("HTTP port of workers for probes and metrics (8001 unless given).")
    ] = None


class Tracing(Api, frozen=True, kw_only=True):
    """Destination of spans."""

    endpoint: Annotated[
        Url | None,
        doc("URL that takes OTLP: by HTTP at port 4318 or with a path, else by gRPC; none: off."),
    ] = None
    sample_percent: Annotated[
        Percent | None, doc("Share of requests traced that belong to no trace yet (0).")
    ] = None


class Observability(Api, frozen=True, kw_only=True):
    """Metrics and traces."""

    metrics: Annotated[Metrics, doc("Prometheus metrics of workers.")] = field(
        default_factory=Metrics
    )
    tracing: Annotated[Tracing, doc("OpenTelemetry traces.")] = field(default_factory=Tracing)


class LLMServiceSpec(Api, frozen=True, kw_only=True):
    """Desired state of a service."""

    model: Annotated[Model, doc("What is served, and where its files come from.")]
    task: Annotated[
        Task | None,
        doc(
            "Generate (unless given): tokens. Embed, Classify and Score: vectors, classes and "
            "scores of texts, by prefill workers alone; canaries ask for one."
        ),
    ] = None
    decode: Annotated[
        WorkerSpec,
        doc(
            "Workers that produce tokens; they also take whole requests. At least one replica, and "
            "none for a task without tokens."
        ),
    ] = field(default_factory=WorkerSpec)
    suspend: Annotated[
        bool | None, doc("Scale routers, prefill and decode workers to zero, and keep the rest.")
    ] = None
    image: Annotated[Image | None, doc("Worker image; none is the operator release's own.")] = None
    image_pull_secrets: Annotated[
        PullSecrets,
        doc(
            "Secrets with which nodes pull the images of all pods and of the model's Job; none: "
            "the operator's --service-pull-secrets. A podTemplate adds its own."
        ),
    ] = field(default_factory=list)
    labels: Annotated[
        LabelMap,
        doc(
            "Labels of all children and pods, below those of each podTemplate. A change is a new "
            "revision of all roles."
        ),
    ] = field(default_factory=dict)
    annotations: Annotated[
        AnnotationMap,
        doc(
            "Annotations of all children and pods, below those of each podTemplate. A change is a "
            "new revision of all roles."
        ),
    ] = field(default_factory=dict)
    engine: Annotated[
        Engine, doc("Settings that all workers share; any change is a new revision.")
    ] = field(default_factory=Engine)
    kv_transfer: Annotated[KVTransfer, doc("How KV travels from prefill to decode workers.")] = (
        field(default_factory=KVTransfer)
    )
    prefill: Annotated[
        WorkerSpec,
        doc(
            "Workers that compute prompts and hand their KV over; 0 replicas is aggregated serving."
        ),
    ] = field(default_factory=WorkerSpec)
    disaggregation: Annotated[
        Disaggregation, doc("When prompts are computed apart from decoding.")
    ] = field(default_factory=Disaggregation)
    router: Annotated[Router, doc("The pods that speak OpenAI HTTP.")] = field(
        default_factory=Router
    )
    rollout: Annotated[Rollout, doc("How changes reach pods.")] = field(default_factory=Rollout)
    security: Annotated[Security, doc("Network policies, Pod Security and keys.")] = field(
        default_factory=Security
    )
    observability: Annotated[Observability, doc("Metrics and traces.")] = field(
        default_factory=Observability
    )
