"""``spec.kvTransfer``: the transfer of KV from prefill to decode workers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from tandem.operator.api.values import Api, ClaimRef, DnsName, Seconds, doc

PeerCount = Annotated[int, Meta(ge=1, le=256)]
"""Links of one worker in addition to those of hand-offs."""


class Connector(StrEnum):
    """Mover of KV bytes."""

    AUTO = "Auto"
    CUDA_P2P = "CudaP2P"
    NIXL = "NIXL"
    TCP = "TCP"


class TransportChoice(StrEnum):
    """Transports that the connector may use."""

    AUTO = "Auto"
    RDMA = "RDMA"
    TCP = "TCP"


class Integrity(StrEnum):
    """Check of received KV before its use."""

    HEADER = "Header"
    DIGEST = "Digest"


class FailurePolicy(StrEnum):
    """Reaction to a failed hand-off."""

    RECOMPUTE = "Recompute"
    FAIL = "Fail"


class NodeLocalMode(StrEnum):
    """Use of a folder that a node's pods share."""

    AUTO = "Auto"
    REQUIRED = "Required"
    DISABLED = "Disabled"


class NodeLocalCopy(StrEnum):
    """Process that copies between the GPUs of a node."""

    AUTO = "Auto"
    DIRECT = "Direct"
    AGENT = "Agent"


class CsiVolume(Api, frozen=True, kw_only=True):
    """An inline CSI volume."""

    driver: Annotated[DnsName, doc("CSI driver that mounts the same folder in all pods of a node.")]


class NodeLocalVolume(Api, frozen=True, kw_only=True):
    """A volume that shows the same folder to all pods of a node."""

    csi: Annotated[CsiVolume | None, doc("An inline volume of a CSI driver.")] = None
    persistent_volume_claim: Annotated[
        ClaimRef | None, doc("Claim of a volume with a folder per node.")
    ] = None


class NodeLocal(Api, frozen=True, kw_only=True):
    """The folder through which pods of one node exchange memory handles."""

    mode: Annotated[
        NodeLocalMode | None,
        doc(
            "Auto (default): used if there is a volume. Required: KVFabricReady is False "
            "without one; requires connector Auto or CudaP2P. Disabled: never used."
        ),
    ] = None
    copy_mode: Annotated[
        NodeLocalCopy | None,
        doc(
            "Process that copies KV between pods of a node. Direct: the decode worker, which "
            "must see both GPUs. Agent: the node agent (the chart's nodeAgent). Auto "
            "(default): Direct, else Agent."
        ),
    ] = field(default=None, name="copy")
    volume: Annotated[NodeLocalVolume | None, doc("Volume to mount in every worker.")] = None


class KVTransfer(Api, frozen=True, kw_only=True):
    """The hand-off of KV between workers."""

    connector: Annotated[
        Connector | None,
        doc(
            "KV transport: Auto (default), CudaP2P (only between GPUs of one node, see "
            "nodeLocal.copy), NIXL or TCP."
        ),
    ] = None
    transport: Annotated[
        TransportChoice | None,
        doc(
            "Network of KV: Auto (default), TCP or RDMA. RDMA has no fallback, except with "
            "nodeLocal.volume: a worker without NIXL then uses TCP. Not with connector "
            "CudaP2P. RDMA not with connector TCP."
        ),
    ] = None
    integrity: Annotated[
        Integrity | None,
        doc("Header (default): identity of every part. Digest: also its bytes."),
    ] = None
    failure_policy: Annotated[
        FailurePolicy | None,
        doc("Recompute (default): retry the request on another worker. Fail: answer 503."),
    ] = None
    lease_duration_seconds: Annotated[
        Seconds | None, doc("Time that a prefill worker keeps exported blocks. Default: 30.")
    ] = None
    pull_peers: Annotated[
        PeerCount | None,
        doc(
            "Number of other workers, of either role, from which a worker may fetch a cached "
            "prefix, if routers predict that this is faster. Default: none."
        ),
    ] = None
    node_local: Annotated[
        NodeLocal,
        doc("Folder shared by the pods of a node, to copy KV without a network."),
    ] = field(default_factory=NodeLocal)
