"""Conditions of an LLMService and every reason they may carry, each with what a person does then.

The table of docs/resource.md is held to this one by a test. Called by ``status`` and the CRD.
"""

from __future__ import annotations

from enum import StrEnum


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
    Reason.ACCEPTED: "The resource is understood.",
    Reason.INVALID_SPEC: "The operator cannot read the spec; the message names the field.",
    Reason.UNSUPPORTED: "This version cannot do what the message names; change that field.",
    Reason.NAME_TAKEN: "Another object has the name of a child; remove it, or rename the service.",
    Reason.CHILD_REFUSED: "The API server refuses what the service needs; the message is its own.",
    Reason.POD_TEMPLATE_CONFLICT: "podTemplate asks for what is protected; remove it there.",
    Reason.POD_TEMPLATE_INVALID: "The API server refuses the pods; the message is its own.",
    Reason.QUOTA_EXCEEDED: "Free some of the namespace's quota, or ask for less in resources.",
    Reason.SECRET_NOT_ALLOWED: "Have the Secret's owner label it tandem.dev/llmservices=allowed.",
    Reason.SECRET_NOT_FOUND: "Create the named Secret, or correct its name or key.",
    Reason.CLAIM_NOT_FOUND: "Create the named PersistentVolumeClaim, or correct its name.",
    Reason.ACCESS_MODE: "Use a volume that several nodes may mount (ReadOnlyMany, ReadWriteMany).",
    Reason.FETCHING: "Wait: a Job fetches the model.",
    Reason.FETCH_FAILED: "Read the message and the Job's log; delete the Job to try again.",
    Reason.CHECKING: "Wait: the model's files are being read.",
    Reason.QUEUED: "Wait: as many models as allowed are being fetched or read just now.",
    Reason.JOB_STUCK: "The model's Job gets no pod, or that does not begin; describe it.",
    Reason.MODEL_NOT_FOUND: "Correct the source; or put the model there and delete the Job.",
    Reason.MODEL_UNSUPPORTED: "Choose a model of an architecture that the message lists.",
    Reason.MODEL_MISMATCH: "Change engine or parallelism so that it fits the model.",
    Reason.MODEL_READY: "The model's files are there and fit.",
    Reason.NOT_NEEDED: "Nothing to wait for: the service does without.",
    Reason.SUSPENDED: "Set spec.suspend to false to start the pods again.",
    Reason.STARTING: "Wait: pods are starting or loading the model.",
    Reason.UNSCHEDULABLE: "No node fits; free or add nodes, or ask for less in resources.",
    Reason.IMAGE_PULL: "Correct the image, or give the pods a pull secret.",
    Reason.CRASH_LOOP: "A container ends again and again; read its log (kubectl logs -p).",
    Reason.POD_REFUSED: "The API server refuses to create pods; the message is its own.",
    Reason.KEYS_REFUSED: "Pods have keys that others do not know; rotate them (keyRotationID).",
    Reason.WIRE_REFUSED: "Routers and workers of two releases find no links; roll all (restartID).",
    Reason.REPLICAS_READY: "All replicas of the role are ready.",
    Reason.LINKS_UP: "Every prefill worker reaches every decode worker.",
    Reason.LINKS_DOWN: "Some pairs cannot exchange KV; see status.links and the workers' logs.",
    Reason.LINKS_UNKNOWN: "Wait for workers of both roles, and for a router to count their links.",
    Reason.NODE_LOCAL_UNAVAILABLE: "Give kvTransfer.nodeLocal a volume, or set its mode to Auto.",
    Reason.CANARY_OK: "A question went through router, prefill and decode, and came back right.",
    Reason.CANARY_PENDING: "Wait: the first question has not been asked yet.",
    Reason.CANARY_QUEUED: "The service is full: the question waited as others do; add replicas.",
    Reason.CANARY_FAILED: "Requests do not work; the message says what the question got.",
    Reason.CANARY_NOT_DISAGGREGATED: "Answers come, but not over the KV path; see KVFabricReady.",
    Reason.STABLE: "Nothing is being rolled out.",
    Reason.ROLLING_OUT: "Wait: the message says which role is at which step.",
    Reason.IN_PLACE_GAP: "No spare capacity and one replica: requests wait until it is back.",
    Reason.WAITING_FOR_KEYS: "Wait: running pods read the new public keys first.",
    Reason.PAUSED: "Set spec.rollout.paused to false to go on.",
    Reason.DEADLINE_EXCEEDED: "The new revision did not come up; correct the spec. "
    "The old one serves.",
    Reason.MANUAL: "replicas in the resource decide.",
    Reason.EXTERNAL: "LLMRoleScalers decide; point an autoscaler at them.",
    Reason.OUT_OF_BOUNDS: "A scaler asks for more or less than the bounds; the bound is used.",
    Reason.HEALTHY: "As many replicas as asked for are serving.",
    Reason.FEWER_REPLICAS: "Some replicas are missing; the role's condition says why.",
    Reason.READY: "Send requests to status.url.",
}
"""What a person should know or do, by reason; shown in docs/resource.md."""
