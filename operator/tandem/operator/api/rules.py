"""CEL rules by type that the API server enforces, each with a message.

A rule belongs to the type whose fields it compares. Later versions may loosen rules, never tighten
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.operator.api.model import HubSource, Model, ModelCache, ModelSource, SourceType
from tandem.operator.api.roles import (
    LLMRoleScalerSpec,
    Parallelism,
    RouterAuth,
    RouterService,
    Scaling,
    WorkerSpec,
)
from tandem.operator.api.service import Engine, LLMServiceSpec, Tracing
from tandem.operator.api.transfer import KVTransfer, NodeLocalVolume

MAX_NAME = 36
"""Maximum characters: names of children append role and revision, up to 63."""


@dataclass(frozen=True, slots=True)
class Rule:
    """CEL rule; ``at`` is the field that the API server's message names."""

    rule: str
    message: str
    at: str = ""

    def manifest(self) -> dict[str, str]:
        """Return the rule for x-kubernetes-validations."""
        path = {"fieldPath": self.at} if self.at else {}
        return {"rule": self.rule, "message": self.message, **path}


_DRAWS = "(!has(self.task) || self.task == 'Generate')"
"""Whether tokens are generated."""
_MEMBERS = {
    SourceType.IMAGE: "image",
    SourceType.CLAIM: "persistentVolumeClaim",
    SourceType.HUB: "hub",
    SourceType.HTTP: "http",
    SourceType.PACKAGE: "package",
}


def _union() -> tuple[Rule, ...]:
    return tuple(
        Rule(
            f"(self.type == '{kind}') == has(self.{member})",
            f"source.{member} must be set when source.type is {kind}, and only then",
        )
        for kind, member in _MEMBERS.items()
    )


def _replicas(role: str) -> str:
    return f"(has(self.{role}) && has(self.{role}.replicas) ? self.{role}.replicas : 1)"


_NEVER = (
    "(has(self.disaggregation) && has(self.disaggregation.mode)"
    " ? self.disaggregation.mode : 'Auto')"
)

_ENDPOINT = (
    r"^https?://([^/?#@\s]+@)?([^/?#:@\s\[\]]+|\[[0-9a-fA-F:.]+\])"
    r"(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?"
    r"(/[^?#\s]*)?$"
)
"""URLs of servers: a host, optionally a port and a path."""
_BY_NETWORK = "(has(self.connector) && self.connector in ['NIXL', 'TCP'])"
_FOLDER_USED = (
    "(has(self.nodeLocal.volume)"
    " && (!has(self.nodeLocal.mode) || self.nodeLocal.mode != 'Disabled')"
    f" && !{_BY_NETWORK})"
)

NAME_RULES = (
    Rule(
        f"self.metadata.name.size() <= {MAX_NAME}",
        f"metadata.name must have at most {MAX_NAME} characters: names of children contain it",
    ),
    Rule(
        "!self.metadata.name.contains('.')",
        "metadata.name must not contain dots, because it becomes a Service name",
    ),
)

RULES: dict[type, tuple[Rule, ...]] = {
    ModelSource: (
        *_union(),
        Rule(
            "self.type != 'HTTP'",
            "source.type HTTP is not supported; use Image or PersistentVolumeClaim",
            ".type",
        ),
    ),
    HubSource: (
        Rule(
            f"!has(self.endpoint) || self.endpoint.matches(r'{_ENDPOINT}')",
            "hub.endpoint must be an http:// or https:// URL with a host and a port up to 65535",
            ".endpoint",
        ),
    ),
    Parallelism: tuple(
        Rule(
            f"!has(self.{name}) || self.{name} == 1",
            f"parallelism.{name} must be 1: a replica runs on one device",
            f".{name}",
        )
        for name in ("tensor", "pipeline", "data")
    ),
    Tracing: (
        Rule(
            f"!has(self.endpoint) || self.endpoint.matches(r'{_ENDPOINT}')",
            "tracing.endpoint must be an http:// or https:// URL with a host and without a query",
            ".endpoint",
        ),
        Rule(
            "!has(self.samplePercent) || has(self.endpoint)",
            "tracing.samplePercent requires tracing.endpoint",
            ".samplePercent",
        ),
    ),
    ModelCache: (
        Rule(
            "has(self.persistentVolumeClaim) != has(self.emptyDir)",
            "model.cache requires exactly one of persistentVolumeClaim and emptyDir",
        ),
    ),
    Model: (
        Rule(
            "!has(self.cache) || !(self.source.type in ['Image', 'PersistentVolumeClaim'])",
            "model.cache requires a source that is fetched (Hub, HTTP, Package); remove it, or "
            "change source.type",
            ".cache",
        ),
    ),
    Engine: (
        Rule(
            "!has(self.blockSize) || self.blockSize in [16, 32, 64, 128, 256]",
            "engine.blockSize must be a power of two from 16 to 256",
            ".blockSize",
        ),
        Rule(
            "!has(self.gpuMemoryUtilizationPercent) || self.gpuMemoryUtilizationPercent >= 1",
            "engine.gpuMemoryUtilizationPercent must be from 1 to 100",
            ".gpuMemoryUtilizationPercent",
        ),
    ),
    Scaling: (
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas)"
            " || self.minReplicas <= self.maxReplicas",
            "scaling.minReplicas must not exceed scaling.maxReplicas",
            ".minReplicas",
        ),
        Rule(
            "!(has(self.minReplicas) || has(self.maxReplicas))"
            " || (has(self.mode) && self.mode == 'External')",
            "scaling.minReplicas and scaling.maxReplicas require scaling.mode External",
        ),
    ),
    WorkerSpec: (
        Rule(
            "!has(self.nodesPerReplica) || self.nodesPerReplica == 1",
            "nodesPerReplica must be 1: a replica runs on one node",
            ".nodesPerReplica",
        ),
    ),
    RouterAuth: (
        Rule(
            "!has(self.apiKeysSecretRef) || !has(self.adminKeysSecretRef)"
            " || self.apiKeysSecretRef.name != self.adminKeysSecretRef.name",
            "adminKeysSecretRef must not name the Secret of apiKeysSecretRef, because every "
            "API key would be an administration key",
            ".adminKeysSecretRef",
        ),
    ),
    RouterService: (
        Rule(
            "!has(self.grpcPort) || self.grpcPort != (has(self.port) ? self.port : 8000)",
            "grpcPort must differ from port",
            ".grpcPort",
        ),
    ),
    NodeLocalVolume: (
        Rule(
            "has(self.csi) != has(self.persistentVolumeClaim)",
            "nodeLocal.volume requires exactly one of csi and persistentVolumeClaim",
        ),
    ),
    KVTransfer: (
        Rule(
            "!(has(self.connector) && self.connector == 'TCP'"
            " && has(self.transport) && self.transport == 'RDMA')",
            "kvTransfer.connector TCP cannot use transport RDMA; choose NIXL or Auto",
            ".transport",
        ),
        Rule(
            "!has(self.connector) || self.connector != 'CudaP2P' || has(self.nodeLocal)"
            " && has(self.nodeLocal.volume)"
            " && (!has(self.nodeLocal.mode) || self.nodeLocal.mode != 'Disabled')",
            "kvTransfer.connector CudaP2P requires kvTransfer.nodeLocal.volume and mode Auto "
            "or Required",
            ".nodeLocal",
        ),
        Rule(
            "!has(self.connector) || self.connector != 'CudaP2P' || !has(self.transport)"
            " || self.transport == 'Auto'",
            "kvTransfer.connector CudaP2P uses no network; remove transport",
            ".transport",
        ),
        Rule(
            "!has(self.integrity)",
            "kvTransfer.integrity is not supported: identity and bytes of every part are "
            "always checked; remove it",
            ".integrity",
        ),
        Rule(
            f"!has(self.nodeLocal) || !has(self.nodeLocal.mode)"
            f" || self.nodeLocal.mode != 'Required' || !{_BY_NETWORK}",
            "kvTransfer.nodeLocal.mode Required requires connector Auto or CudaP2P",
            ".nodeLocal.mode",
        ),
        Rule(
            f"!has(self.nodeLocal) || !has(self.nodeLocal.copy) || {_FOLDER_USED}",
            "kvTransfer.nodeLocal.copy requires nodeLocal.volume, mode Auto or Required, and "
            "connector Auto or CudaP2P",
            ".nodeLocal.copy",
        ),
        Rule(
            f"!has(self.nodeLocal) || !has(self.nodeLocal.volume) || !{_BY_NETWORK}"
            " || has(self.nodeLocal.mode) && self.nodeLocal.mode == 'Disabled'",
            "kvTransfer.nodeLocal.volume requires connector Auto or CudaP2P; remove one",
            ".nodeLocal.volume",
        ),
    ),
    LLMServiceSpec: (
        Rule(
            f"!{_DRAWS} || !has(self.decode) || !has(self.decode.replicas)"
            " || self.decode.replicas >= 1",
            "decode.replicas must be at least 1: decode workers generate tokens; use suspend "
            "to stop a service",
            ".decode.replicas",
        ),
        Rule(
            f"{_DRAWS} || !has(self.decode) || has(self.decode.replicas)"
            " && self.decode.replicas == 0 && !has(self.decode.scaling)",
            "decode workers generate tokens, which this task does not use: remove decode, or "
            "set decode.replicas to 0 without scaling",
            ".decode",
        ),
        Rule(
            f"{_DRAWS} || {_replicas('prefill')} >= 1",
            "prefill.replicas must be at least 1: prefill workers serve a task without tokens; "
            "use suspend to stop a service",
            ".prefill",
        ),
        Rule(
            f"{_DRAWS} || !has(self.prefill) || !has(self.prefill.scaling)"
            " || !has(self.prefill.scaling.minReplicas) || self.prefill.scaling.minReplicas >= 1",
            "prefill.scaling.minReplicas must be at least 1 for a task without tokens",
            ".prefill",
        ),
        Rule(
            f"{_DRAWS} || !has(self.disaggregation) || !has(self.disaggregation.mode)",
            "disaggregation.mode requires task Generate; remove it",
            ".disaggregation",
        ),
        Rule(
            f"{_DRAWS} || !has(self.kvTransfer)",
            "kvTransfer requires task Generate; remove it",
            ".kvTransfer",
        ),
        Rule(
            "!has(self.decode) || !has(self.decode.scaling)"
            " || !has(self.decode.scaling.minReplicas)"
            " || self.decode.scaling.minReplicas >= 1",
            "decode.scaling.minReplicas must be at least 1",
            ".decode.scaling",
        ),
        Rule(
            f"{_NEVER} != 'Always' || {_replicas('prefill')} >= 1",
            "disaggregation.mode Always requires at least one prefill replica",
            ".disaggregation",
        ),
        Rule(
            f"{_NEVER} != 'Never' || !has(self.prefill) || {_replicas('prefill')} == 0"
            " || !has(self.prefill.replicas)",
            "disaggregation.mode Never leaves prefill workers idle: set prefill.replicas to 0",
            ".prefill",
        ),
        Rule(
            "!has(self.observability) || !has(self.observability.metrics)"
            " || !has(self.observability.metrics.port)"
            " || !(self.observability.metrics.port in [5570, 5580, 8000])"
            " && !(self.observability.metrics.port >= 5590"
            " && self.observability.metrics.port <= 5605)",
            "observability.metrics.port must not be a port of Tandem: 5570, 5580, 8000, 5590 "
            "to 5605",
            ".observability.metrics.port",
        ),
    ),
    LLMRoleScalerSpec: (
        Rule(
            "self.serviceName == oldSelf.serviceName && self.role == oldSelf.role",
            "serviceName and role of a scaler cannot be changed",
        ),
    ),
}
