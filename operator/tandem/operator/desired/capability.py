"""Fields of the resource that this version cannot serve: refused with a message.

The version that supports a field removes its entry of ``_REFUSED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.transfer import Connector, NodeLocalMode, TransportChoice
from tandem.operator.desired.fetching import unusable_hub
from tandem.operator.desired.naming import WORKERS, Role
from tandem.operator.desired.policy import node_local_volume, worker_role
from tandem.operator.desired.tracing import unusable_endpoint, unused_share

Question = Callable[[LLMServiceSpec], object]
"""Function that returns a field's value; None if it is not set or has no effect."""


def _above_one(role: Role, field: str) -> Question:
    def value_of(spec: LLMServiceSpec) -> object:
        part = worker_role(spec, role)
        holder = part if field == "nodes_per_replica" else part.parallelism
        number: int = getattr(holder, field) or 1
        return number if number > 1 else None

    return value_of


def _role_fields() -> Iterator[tuple[str, Question, str]]:
    for role in WORKERS:
        yield (
            f"{role}.nodesPerReplica",
            _above_one(role, "nodes_per_replica"),
            "a replica runs on one node; use 1",
        )
        for name in ("tensor", "pipeline", "data"):
            field = f"{role}.parallelism.{name}"
            yield field, _above_one(role, name), "a replica runs on one device; use 1"


def _connector(spec: LLMServiceSpec) -> object:
    """Return the connector of a resource from before the API server's check."""
    value = spec.kv_transfer.connector
    return value if value is Connector.CUDA_P2P and node_local_volume(spec) is None else None


def _transport(spec: LLMServiceSpec) -> object:
    """Return a transport for a connector without network."""
    value = spec.kv_transfer.transport
    chosen = spec.kv_transfer.connector is Connector.CUDA_P2P and value is not TransportChoice.AUTO
    return value if chosen else None


def _meets(spec: LLMServiceSpec) -> bool:
    """Return whether the connector uses a folder of the node."""
    return spec.kv_transfer.connector in (None, Connector.AUTO, Connector.CUDA_P2P)


def _has_folder(spec: LLMServiceSpec) -> bool:
    """Return whether workers have a folder on their node."""
    return _meets(spec) and node_local_volume(spec) is not None


def _node_mode(spec: LLMServiceSpec) -> object:
    """Return the mode of a required folder that no worker would read."""
    mode = spec.kv_transfer.node_local.mode
    return mode if mode is NodeLocalMode.REQUIRED and not _meets(spec) else None


def _node_copy(spec: LLMServiceSpec) -> object:
    return None if _has_folder(spec) else spec.kv_transfer.node_local.copy_mode


def _node_volume(spec: LLMServiceSpec) -> object:
    volume = node_local_volume(spec)
    return None if _has_folder(spec) else volume


def _shown(value: object) -> str:
    """Return a value as in the resource; empty for several fields."""
    return f" {value}" if isinstance(value, str | int) else ""


_REFUSED: tuple[tuple[str, Question, str], ...] = (
    *_role_fields(),
    (
        "model.source.type",
        lambda spec: None if spec.model.source.http is None else "HTTP",
        "use Image or a volume",
    ),
    ("model.source.hub.endpoint", unusable_hub, "use http:// or https:// with a port up to 65535"),
    ("kvTransfer.connector", _connector, "set nodeLocal.volume, with mode Auto or Required"),
    (
        "kvTransfer.transport",
        _transport,
        "connector CudaP2P uses no network; remove one of them",
    ),
    (
        "kvTransfer.integrity",
        lambda spec: spec.kv_transfer.integrity,
        "identity and bytes of every part are always checked; remove it",
    ),
    (
        "kvTransfer.nodeLocal.mode",
        _node_mode,
        "it requires connector Auto or CudaP2P; choose one of them, or mode Disabled",
    ),
    (
        "kvTransfer.nodeLocal.copy",
        _node_copy,
        "it requires nodeLocal.volume, mode Auto or Required, and connector Auto or CudaP2P",
    ),
    (
        "kvTransfer.nodeLocal.volume",
        _node_volume,
        "it requires connector Auto or CudaP2P; remove one of them",
    ),
    (
        "observability.tracing.endpoint",
        unusable_endpoint,
        "use http:// or https:// with a host and without a query",
    ),
    (
        "observability.tracing.samplePercent",
        unused_share,
        "set an endpoint",
    ),
)
"""Fields, their values, and the remedy."""


def unsupported(spec: LLMServiceSpec) -> str | None:
    """Return the refusal of an unsupported field, or None."""
    for field, value_of, instead in _REFUSED:
        value = value_of(spec)
        if value is not None:
            return f"spec.{field}:{_shown(value)} is not supported; {instead}"
    return None


def refused_fields() -> list[str]:
    """Return the fields below spec with refused values."""
    return [field for field, _, _ in _REFUSED]
