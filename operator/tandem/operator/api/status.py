"""``LLMService.status``: what is, as the operator last saw it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from tandem.operator.api.values import Api, doc

ShortStatus = Annotated[str, Meta(max_length=253)]
Message = Annotated[str, Meta(max_length=32768)]
Integer = Annotated[int, Meta(ge=0)]
_LIST_TYPE = "x-kubernetes-list-type"
_MAP_KEYS = "x-kubernetes-list-map-keys"


class Condition(Api, frozen=True, kw_only=True):
    """One condition, as Kubernetes writes them."""

    type: Annotated[Annotated[str, Meta(max_length=316)], doc("Name of the condition.")]
    status: Annotated[Literal["True", "False", "Unknown"], doc("True, False or Unknown.")]
    reason: Annotated[Annotated[str, Meta(max_length=1024, min_length=1)], doc("Why, in one word.")]
    message: Annotated[Message, doc("Why, for a person.")] = ""
    last_transition_time: Annotated[str, doc("When the status last changed.", format="date-time")]
    observed_generation: Annotated[Integer, doc("Generation of the spec that was judged.")] = 0


class ModelStatus(Api, frozen=True, kw_only=True):
    """Resolved model; pinned, and reused by every later pod."""

    resolved_revision: Annotated[
        ShortStatus | None, doc("Commit or digest to which a moving source was pinned.")
    ] = None
    requested: Annotated[ShortStatus | None, doc("Digest of the source that was resolved.")] = None
    digest: Annotated[ShortStatus | None, doc("Digest of the model's manifest.")] = None
    fingerprint: Annotated[
        ShortStatus | None, doc("Digest of config and weights, as every worker must report it.")
    ] = None
    bytes: Annotated[Integer | None, doc("Size of the model's files.")] = None
    max_model_len: Annotated[Integer | None, doc("Longest context it was made for.")] = None
    num_heads: Annotated[Integer | None, doc("Attention heads of a layer.")] = None
    num_kv_heads: Annotated[Integer | None, doc("Heads of a layer that have KV.")] = None


class Revisions(Api, frozen=True, kw_only=True):
    """Revisions of the whole service, eight hex digits each."""

    current: Annotated[ShortStatus | None, doc("What most pods run.")] = None
    updated: Annotated[ShortStatus | None, doc("What the spec asks for.")] = None
    stable: Annotated[ShortStatus | None, doc("The last one that answered the canary.")] = None


class RoleStatus(Api, frozen=True, kw_only=True):
    """One revision of one role."""

    name: Annotated[ShortStatus, doc("prefill, decode or router.")]
    revision: Annotated[ShortStatus, doc("Revision of the role.")]
    desired: Annotated[Integer, doc("Replicas that it shall have.")]
    ready: Annotated[Integer, doc("Replicas that are ready.")]
    updated: Annotated[Integer, doc("Replicas that exist.")]
    draining: Annotated[Integer, doc("Pods that are leaving and finish their requests.")]
    workload_ref: Annotated[ShortStatus | None, doc("Name of the Deployment.")] = None


class Links(Api, frozen=True, kw_only=True):
    """KV links between prefill and decode workers, as the routers see them."""

    healthy: Annotated[Integer, doc("Links over which KV can go.")]
    total: Annotated[Integer, doc("Pairs of a prefill and a decode worker.")]
    transport: Annotated[ShortStatus | None, doc("What moves the bytes.")] = None
    median_megabytes_per_second: Annotated[
        Integer | None,
        doc(
            "KV that comes a second over the middle one of the links that hand-offs used in the "
            "last minutes, as last told where it moved by less than a fifth; none while none did."
        ),
    ] = None
    quarantined: Annotated[
        Annotated[list[ShortStatus], Meta(max_length=32)],
        doc(
            "Links that are not used, by the pods of their ends, and why; at most 32.",
            **{_LIST_TYPE: "atomic"},
        ),
    ] = field(default_factory=list)
    down: Annotated[
        Annotated[list[ShortStatus], Meta(max_length=2)],
        doc(
            "Why links are down, and how many are for it; the two reasons that most have.",
            **{_LIST_TYPE: "atomic"},
        ),
    ] = field(default_factory=list)


class ScalerStatus(Api, frozen=True, kw_only=True):
    """An LLMRoleScaler of this service."""

    role: Annotated[ShortStatus, doc("prefill or decode.")]
    name: Annotated[ShortStatus, doc("Name of the LLMRoleScaler.")]
    replicas: Annotated[
        Integer | None, doc("Replicas of the role now; a scaler made anew begins with them.")
    ] = None


class Keys(Api, frozen=True, kw_only=True):
    """CURVE keys."""

    generation: Annotated[Integer, doc("Generation that new pods get.")] = 0
    rotating: Annotated[bool, doc("Keys of an older generation are still needed.")] = False
    rotation_id: Annotated[
        ShortStatus | None, doc("security.keyRotationID that the generation stands for.")
    ] = field(default=None, name="rotationID")
    read: Annotated[Integer, doc("Newest generation whose public keys all pods have read.")] = 0
    published_at: Annotated[
        str | None, doc("When the newest public keys were published.", format="date-time")
    ] = None


class RolloutStatus(Api, frozen=True, kw_only=True):
    """State of a rollout, from which another operator can continue."""

    targets: Annotated[dict[str, ShortStatus], doc("Revision each role moves to.")] = field(
        default_factory=dict
    )
    stable: Annotated[dict[str, ShortStatus], doc("Revision of each role that last served.")] = (
        field(default_factory=dict)
    )
    served: Annotated[
        Annotated[list[dict[str, ShortStatus]], Meta(max_length=8)],
        doc(
            "Revisions of each role that answered the canary, were left for other targets before "
            "they were stable, and still have replicas; the newest first.",
            **{_LIST_TYPE: "atomic"},
        ),
    ] = field(default_factory=list)
    servable: Annotated[ShortStatus | None, doc("Targets that answered the canary.")] = None
    failed: Annotated[
        ShortStatus | None, doc("Targets that missed the deadline and were taken back.")
    ] = None
    in_place: Annotated[bool, doc("No spare capacity: old pods leave first.")] = False
    ready: Annotated[Integer, doc("New replicas that were ready at the last progress.")] = 0
    progressed_at: Annotated[
        str | None, doc("When the rollout last made progress.", format="date-time")
    ] = None


class Summary(Api, frozen=True, kw_only=True):
    """Short forms for kubectl get."""

    prefill: Annotated[ShortStatus | None, doc("Ready and desired prefill replicas.")] = None
    decode: Annotated[ShortStatus | None, doc("Ready and desired decode replicas.")] = None
    router: Annotated[ShortStatus | None, doc("Ready and desired routers.")] = None
    links: Annotated[ShortStatus | None, doc("Healthy and expected KV links.")] = None


class LLMServiceStatus(Api, frozen=True, kw_only=True):
    """Observed state of a service."""

    observed_generation: Annotated[
        Integer, doc("Generation of the spec that this status answers.")
    ] = 0
    url: Annotated[ShortStatus | None, doc("Where clients in the cluster send requests.")] = None
    mode: Annotated[
        Literal["Disaggregated", "Aggregated", "Pooling"] | None,
        doc("Whether prompts really are computed apart from decoding."),
    ] = None
    summary: Annotated[Summary, doc("Short forms for kubectl get.")] = field(
        default_factory=Summary
    )
    model: Annotated[ModelStatus, doc("What the model turned out to be.")] = field(
        default_factory=ModelStatus
    )
    revisions: Annotated[Revisions, doc("Revisions of the whole service.")] = field(
        default_factory=Revisions
    )
    roles: Annotated[
        Annotated[list[RoleStatus], Meta(max_length=32)],
        doc(
            "Every revision of every role that has pods.",
            **{_LIST_TYPE: "map", _MAP_KEYS: ["name", "revision"]},
        ),
    ] = field(default_factory=list)
    rollout: Annotated[RolloutStatus, doc("Memory of the rollout.")] = field(
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
            "What holds and what does not, each with its reason.",
            **{_LIST_TYPE: "map", _MAP_KEYS: ["type"]},
        ),
    ] = field(default_factory=list)
