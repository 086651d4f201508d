"""``spec.kvTransfer``: how KV travels from prefill to decode workers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from tandem.operator.api.values import Api, ClaimRef, Count, DnsName, Seconds, doc

PeerCount = Annotated[int, Meta(ge=1, le=256)]
"""Of one worker's links beside those of hand-offs."""


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


class PreflightMode(StrEnum):
    """Effect of a link's measured rate."""

    OFF = "Off"
    WARN = "Warn"
    REQUIRE = "Require"


class CsiVolume(Api, frozen=True, kw_only=True):
    """An inline CSI volume."""

    driver: Annotated[DnsName, doc("CSI driver that gives each node's pods one folder.")]


class NodeLocalVolume(Api, frozen=True, kw_only=True):
    """A volume that shows the same folder to all pods of a node."""

    csi: Annotated[CsiVolume | None, doc("An inline volume of a CSI driver.")] = None
    persistent_volume_claim: Annotated[
        ClaimRef | None, doc("A claim that shows every node its own folder.")
    ] = None


class NodeLocal(Api, frozen=True, kw_only=True):
    """The folder through which pods of one node exchange memory handles."""

    mode: Annotated[
        NodeLocalMode | None,
        doc(
            "Auto (unless given): used where there is a volume. Required: KVFabricReady is False "
            "without one; goes with connector Auto or CudaP2P. Disabled: never, whatever volume "
            "is named."
        ),
    ] = None
    copy_mode: Annotated[
        NodeLocalCopy | None,
        doc(
            "Who copies KV between pods of a node. Direct: the decode worker, which has to see "
            "both GPUs. Agent: the node's agent (the chart's nodeAgent). Auto (unless given): the "
            "one, then the other."
        ),
    ] = field(default=None, name="copy")
    volume: Annotated[NodeLocalVolume | None, doc("The volume to mount in every worker.")] = None


class Preflight(Api, frozen=True, kw_only=True):
    """A link is measured before it is used."""

    mode: Annotated[
        PreflightMode | None,
        doc(
            "What becomes of a link that gives less than minMegabytesPerSecond. Warn (unless "
            "given): workers' logs and series say so. Require: it is not used. Off: nothing."
        ),
    ] = None
    min_megabytes_per_second: Annotated[
        Count | None,
        doc("Rate below which a link counts as slow; unless given none does, whatever the mode."),
    ] = None


class KVTransfer(Api, frozen=True, kw_only=True):
    """The hand-off of KV between workers."""

    connector: Annotated[
        Connector | None,
        doc(
            "Mover of KV bytes: Auto (unless given), CudaP2P (between GPUs of one node, as "
            "nodeLocal.copy says, and no other way), NIXL or TCP."
        ),
    ] = None
    transport: Annotated[
        TransportChoice | None,
        doc(
            "What carries KV over the network: Auto (unless given), TCP, or RDMA, which is RDMA "
            "or nothing, except beside nodeLocal.volume: a worker that cannot load NIXL takes TCP "
            "then. Not with connector CudaP2P, nor RDMA with connector TCP."
        ),
    ] = None
    integrity: Annotated[
        Integrity | None,
        doc("Header (unless given): identity of every part. Digest: its bytes too."),
    ] = None
    failure_policy: Annotated[
        FailurePolicy | None,
        doc("Recompute (unless given): the request goes on elsewhere. Fail: it is answered 503."),
    ] = None
    no_progress_timeout_seconds: Annotated[
        Seconds | None, doc("A load without progress for this long has failed.")
    ] = None
    lease_duration_seconds: Annotated[
        Seconds | None, doc("How long a prefill worker keeps exported blocks (30 unless given).")
    ] = None
    pull_peers: Annotated[
        PeerCount | None,
        doc(
            "Number of other workers, of either role, from which each may pull the cached start "
            "of a prompt, if routers predict that this is faster than computing it. Unless "
            "given, none."
        ),
    ] = None
    node_local: Annotated[
        NodeLocal,
        doc("A folder shared by the pods of a node, where KV is copied without a network."),
    ] = field(default_factory=NodeLocal)
    preflight: Annotated[Preflight, doc("Measurement of links before use.")] = field(
        default_factory=Preflight
    )
