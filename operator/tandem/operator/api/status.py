"""``LLMService.status``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, field

from tandem.operator.api.values import Api, doc


class ConditionType(StrEnum):
    """Conditions, in the order in which a service comes up."""

    ACCEPTED = "Accepted"
    MODEL_READY = "ModelReady"
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    ROUTER_READY = "RouterReady"
    KV_FABRIC_READY = "KVFabricReady"
    SERVABLE = "Servable"
    PROGRESSING = "Progressing"
    SCALING_ACTIVE = "ScalingActive"
    DEGRADED = "Degraded"
    READY = "Ready"


class Reason(StrEnum):
    """Reasons, CamelCase as Kubernetes wants them."""

    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    UNSUPPORTED = "Unsupported"
    NAME_TAKEN = "NameTaken"
    CHILD_REFUSED = "ChildRefused"
    POD_TEMPLATE_CONFLICT = "PodTemplateConflict"
    POD_TEMPLATE_INVALID = "PodTemplateInvalid"
    QUOTA_EXCEEDED = "QuotaExceeded"
    SECRET_NOT_ALLOWED = "SecretNotAllowed"
    SECRET_NOT_FOUND = "SecretNotFound"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    ACCESS_MODE = "AccessMode"
    FETCHING = "Fetching"
    FETCH_FAILED = "FetchFailed"
    CHECKING = "Checking"
    QUEUED = "Queued"
    JOB_STUCK = "JobStuck"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_UNSUPPORTED = "ModelUnsupported"
    MODEL_MISMATCH = "ModelMismatch"
    MODEL_READY = "ModelReady"
    NOT_NEEDED = "NotNeeded"
    SUSPENDED = "Suspended"
    STARTING = "Starting"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL = "ImagePull"
    CRASH_LOOP = "CrashLoop"
    POD_REFUSED = "PodRefused"
    KEYS_REFUSED = "KeysRefused"
    WIRE_REFUSED = "WireRefused"
    REPLICAS_READY = "ReplicasReady"
    LINKS_UP = "LinksUp"
    LINKS_DOWN = "LinksDown"
    LINKS_UNKNOWN = "LinksUnknown"
    NODE_LOCAL_UNAVAILABLE = "NodeLocalUnavailable"
    CANARY_OK = "CanaryOK"
    CANARY_PENDING = "CanaryPending"
    CANARY_QUEUED = "CanaryQueued"
    CANARY_FAILED = "CanaryFailed"
    CANARY_NOT_DISAGGREGATED = "CanaryNotDisaggregated"
    STABLE = "Stable"
    ROLLING_OUT = "RollingOut"
    IN_PLACE_GAP = "InPlaceGap"
    WAITING_FOR_KEYS = "WaitingForKeys"
    PAUSED = "Paused"
    DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    MANUAL = "Manual"
    EXTERNAL = "External"
    OUT_OF_BOUNDS = "OutOfBounds"
    HEALTHY = "Healthy"
    FEWER_REPLICAS = "FewerReplicas"
    READY = "Ready"


ADVICE: dict[Reason, str] = {
    Reason.ACCEPTED: "The resource is valid.",
    Reason.INVALID_SPEC: "The operator cannot read the spec; the message names the field.",
    Reason.UNSUPPORTED: "This version cannot do what the message names; change that field.",
    Reason.NAME_TAKEN: "Another object has the name of a child; remove it, or rename the service.",
    Reason.CHILD_REFUSED: "The API server refuses a child object; see its message.",
    Reason.POD_TEMPLATE_CONFLICT: "podTemplate sets a protected field; remove it.",
    Reason.POD_TEMPLATE_INVALID: "The API server refuses the pods; see its message.",
    Reason.QUOTA_EXCEEDED: "Free quota in the namespace, or request less in resources.",
    Reason.SECRET_NOT_ALLOWED: "The Secret's owner must label it tandem.dev/llmservices=allowed.",
    Reason.SECRET_NOT_FOUND: "Create the named Secret, or correct its name or key.",
    Reason.CLAIM_NOT_FOUND: "Create the named PersistentVolumeClaim, or correct its name.",
    Reason.ACCESS_MODE: "Use a volume that several nodes may mount (ReadOnlyMany, ReadWriteMany).",
    Reason.FETCHING: "Wait: a Job fetches the model.",
    Reason.FETCH_FAILED: "Read the message and the Job's log; delete the Job to try again.",
    Reason.CHECKING: "Wait: the model's files are being read.",
    Reason.QUEUED: "Wait: the maximum number of models is being fetched or read.",
    Reason.JOB_STUCK: "The model Job has no pod, or it does not start; describe it.",
    Reason.MODEL_NOT_FOUND: "Correct the source, or provide the model and delete the Job.",
    Reason.MODEL_UNSUPPORTED: "Choose a model of an architecture that the message lists.",
    Reason.MODEL_MISMATCH: "Change engine or parallelism to fit the model.",
    Reason.MODEL_READY: "The model's files are present and suitable.",
    Reason.NOT_NEEDED: "Not required by this service.",
    Reason.SUSPENDED: "Set spec.suspend to false to start the pods again.",
    Reason.STARTING: "Wait: pods are starting or loading the model.",
    Reason.UNSCHEDULABLE: "No node fits; free or add nodes, or request less in resources.",
    Reason.IMAGE_PULL: "Correct the image, or give the pods a pull secret.",
    Reason.CRASH_LOOP: "A container exits repeatedly; read its log (kubectl logs -p).",
    Reason.POD_REFUSED: "The API server refuses to create pods; see its message.",
    Reason.KEYS_REFUSED: "Pods have keys that others do not know; rotate them (keyRotationID).",
    Reason.WIRE_REFUSED: "Routers and workers of two releases cannot link; set a new restartID.",
    Reason.REPLICAS_READY: "All replicas of the role are ready.",
    Reason.LINKS_UP: "Every prefill worker is linked with every decode worker.",
    Reason.LINKS_DOWN: "Some pairs cannot exchange KV; see status.links and the workers' logs.",
    Reason.LINKS_UNKNOWN: "Wait for workers of both roles, and for a router to report their links.",
    Reason.NODE_LOCAL_UNAVAILABLE: "Give kvTransfer.nodeLocal a volume, or set its mode to Auto.",
    Reason.CANARY_OK: "The canary request got the right answer over router, prefill and decode.",
    Reason.CANARY_PENDING: "Wait: no canary request has been sent.",
    Reason.CANARY_QUEUED: "The service is full: the canary request was queued; add replicas.",
    Reason.CANARY_FAILED: "Requests fail; the message has the canary's result.",
    Reason.CANARY_NOT_DISAGGREGATED: "Answers are right but without a hand-off; see KVFabricReady.",
    Reason.STABLE: "Nothing is being rolled out.",
    Reason.ROLLING_OUT: "Wait: the message names the role and the step.",
    Reason.IN_PLACE_GAP: "No spare capacity and one replica: requests wait until it is back.",
    Reason.WAITING_FOR_KEYS: "Wait until running pods have read the new public keys.",
    Reason.PAUSED: "Set spec.rollout.paused to false to continue.",
    Reason.DEADLINE_EXCEEDED: "The new revision failed; correct the spec. The old one serves.",
    Reason.MANUAL: "The replicas field sets the number.",
    Reason.EXTERNAL: "LLMRoleScalers set the number; point an autoscaler at them.",
    Reason.OUT_OF_BOUNDS: "A scaler requests a number outside the bounds; the bound is used.",
    Reason.HEALTHY: "All requested replicas are serving.",
    Reason.FEWER_REPLICAS: "Replicas are missing; see the role's condition.",
    Reason.READY: "Send requests to status.url.",
}
"""What a person should know or do, by reason; shown in docs/resource.md."""


ShortStatus = Annotated[str, Meta(max_length=253)]
Message = Annotated[str, Meta(max_length=32768)]
Integer = Annotated[int, Meta(ge=0)]
_LIST_TYPE = "x-kubernetes-list-type"
_MAP_KEYS = "x-kubernetes-list-map-keys"


class Condition(Api, frozen=True, kw_only=True):
    """One condition, as Kubernetes writes them."""

    type: Annotated[Annotated[str, Meta(max_length=316)], doc("Name of the condition.")]
    status: Annotated[Literal["True", "False", "Unknown"], doc("True, False or Unknown.")]
    reason: Annotated[
        Annotated[str, Meta(max_length=1024, min_length=1)], doc("Reason, in one word.")
    ]
    message: Annotated[Message, doc("Explanation.")] = ""
    last_transition_time: Annotated[
        str, doc("Time of the last change of status.", format="date-time")
    ]
    observed_generation: Annotated[Integer, doc("Generation of the spec that was evaluated.")] = 0


class ModelStatus(Api, frozen=True, kw_only=True):
    """Resolved model; pinned, and reused by every later pod."""

    resolved_revision: Annotated[
        ShortStatus | None, doc("Commit or digest of a pinned branch or tag.")
    ] = None
    requested: Annotated[ShortStatus | None, doc("Digest of the source that was resolved.")] = None
    digest: Annotated[ShortStatus | None, doc("Digest of the model's manifest.")] = None
    fingerprint: Annotated[
        ShortStatus | None, doc("Digest of config and weights. Every worker must report it.")
    ] = None
    bytes: Annotated[Integer | None, doc("Size of the model's files.")] = None
    max_model_len: Annotated[Integer | None, doc("Maximum context of the model.")] = None
    num_heads: Annotated[Integer | None, doc("Attention heads of a layer.")] = None
    num_kv_heads: Annotated[Integer | None, doc("KV heads of a layer.")] = None


class Revisions(Api, frozen=True, kw_only=True):
    """Revisions of the whole service, eight hex digits each."""

    current: Annotated[ShortStatus | None, doc("Revision of most pods.")] = None
    updated: Annotated[ShortStatus | None, doc("Revision of the spec.")] = None
    stable: Annotated[ShortStatus | None, doc("Last revision that answered the canary.")] = None


class RoleStatus(Api, frozen=True, kw_only=True):
    """One revision of one role."""

    name: Annotated[ShortStatus, doc("prefill, decode or router.")]
    revision: Annotated[ShortStatus, doc("Revision of the role.")]
    desired: Annotated[Integer, doc("Requested replicas.")]
    ready: Annotated[Integer, doc("Ready replicas.")]
    updated: Annotated[Integer, doc("Replicas that exist, ready or not.")]
    draining: Annotated[Integer, doc("Pods that are stopping and finish their requests.")]
    workload_ref: Annotated[ShortStatus | None, doc("Name of the Deployment.")] = None


class Links(Api, frozen=True, kw_only=True):
    """KV links between prefill and decode workers, as the routers see them."""

    healthy: Annotated[Integer, doc("Links that can transfer KV.")]
    total: Annotated[Integer, doc("Pairs of a prefill and a decode worker.")]
    transport: Annotated[ShortStatus | None, doc("Transport of KV.")] = None
    median_megabytes_per_second: Annotated[
        Integer | None,
        doc(
            "Median rate of the links with hand-offs in the last minutes. Updated if it "
            "changes by at least a fifth. Unset without hand-offs."
        ),
    ] = None
    quarantined: Annotated[
        Annotated[list[ShortStatus], Meta(max_length=32)],
        doc(
            "Unused links with both pods and the reason; at most 32.",
            **{_LIST_TYPE: "atomic"},
        ),
    ] = field(default_factory=list)
    down: Annotated[
        Annotated[list[ShortStatus], Meta(max_length=2)],
        doc(
            "The two most frequent reasons for links that are down, with counts.",
            **{_LIST_TYPE: "atomic"},
        ),
    ] = field(default_factory=list)


class ScalerStatus(Api, frozen=True, kw_only=True):
    """An LLMRoleScaler of this service."""

    role: Annotated[ShortStatus, doc("prefill or decode.")]
    name: Annotated[ShortStatus, doc("Name of the LLMRoleScaler.")]
    replicas: Annotated[
        Integer | None, doc("Current replicas of the role. A new scaler starts with this number.")
    ] = None


class Keys(Api, frozen=True, kw_only=True):
    """CURVE keys."""

    generation: Annotated[Integer, doc("Generation of new pods.")] = 0
    rotating: Annotated[bool, doc("An older generation is still in use.")] = False
    rotation_id: Annotated[ShortStatus | None, doc("security.keyRotationID of the generation.")] = (
        field(default=None, name="rotationID")
    )
    read: Annotated[Integer, doc("Newest generation whose public keys all pods have read.")] = 0
    published_at: Annotated[
        str | None, doc("Time of publication of the newest public keys.", format="date-time")
    ] = None


class RolloutStatus(Api, frozen=True, kw_only=True):
    """State of a rollout, from which another operator can continue."""

    targets: Annotated[dict[str, ShortStatus], doc("Target revision of each role.")] = field(
        default_factory=dict
    )
    stable: Annotated[dict[str, ShortStatus], doc("Revision of each role that last served.")] = (
        field(default_factory=dict)
    )
    served: Annotated[
        Annotated[list[dict[str, ShortStatus]], Meta(max_length=8)],
        doc(
            "Revisions of each role that answered the canary, were replaced before they were "
            "stable, and still have replicas; newest first.",
            **{_LIST_TYPE: "atomic"},
        ),
    ] = field(default_factory=list)
    servable: Annotated[ShortStatus | None, doc("Targets that answered the canary.")] = None
    failed: Annotated[
        ShortStatus | None, doc("Targets that missed the deadline and were rolled back.")
    ] = None
    in_place: Annotated[bool, doc("No spare capacity: old pods stop first.")] = False
    ready: Annotated[Integer, doc("Ready new replicas at the last progress.")] = 0
    progressed_at: Annotated[str | None, doc("Time of the last progress.", format="date-time")] = (
        None
    )


class Summary(Api, frozen=True, kw_only=True):
    """Short forms for kubectl get."""

    prefill: Annotated[ShortStatus | None, doc("Ready and desired prefill replicas.")] = None
    decode: Annotated[ShortStatus | None, doc("Ready and desired decode replicas.")] = None
    router: Annotated[ShortStatus | None, doc("Ready and desired routers.")] = None
    links: Annotated[ShortStatus | None, doc("Healthy and expected KV links.")] = None


class LLMServiceStatus(Api, frozen=True, kw_only=True):
    """Observed state of a service."""

    observed_generation: Annotated[Integer, doc("Generation of the spec of this status.")] = 0
    url: Annotated[ShortStatus | None, doc("URL for clients in the cluster.")] = None
    mode: Annotated[
        Literal["Disaggregated", "Aggregated", "Pooling"] | None,
        doc("Actual mode: Disaggregated, Aggregated or Pooling."),
    ] = None
    summary: Annotated[Summary, doc("Short forms for kubectl get.")] = field(
        default_factory=Summary
    )
    model: Annotated[ModelStatus, doc("Resolved model.")] = field(default_factory=ModelStatus)
    revisions: Annotated[Revisions, doc("Revisions of the whole service.")] = field(
        default_factory=Revisions
    )
    roles: Annotated[
        Annotated[list[RoleStatus], Meta(max_length=32)],
        doc(
            "Each revision with pods, by role.",
            **{_LIST_TYPE: "map", _MAP_KEYS: ["name", "revision"]},
        ),
    ] = field(default_factory=list)
    rollout: Annotated[RolloutStatus, doc("State of the rollout.")] = field(
        default_factory=RolloutStatus
    )
    links: Annotated[Links | None, doc("KV links between workers.")] = None
    scalers: Annotated[
        Annotated[list[ScalerStatus], Meta(max_length=2)],
        doc("LLMRoleScalers of the service.", **{_LIST_TYPE: "map", _MAP_KEYS: ["role"]}),
    ] = field(default_factory=list)
    keys: Annotated[Keys, doc("CURVE keys.")] = field(default_factory=Keys)
    conditions: Annotated[
        Annotated[list[Condition], Meta(max_length=32)],
        doc(
            "Conditions, each with a reason.",
            **{_LIST_TYPE: "map", _MAP_KEYS: ["type"]},
        ),
    ] = field(default_factory=list)
