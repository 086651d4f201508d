"""Settings of the KV hand-off. Those with a help text are flags, the others constants."""

from dataclasses import dataclass, fields

from tandem.base.settings import (
    check_choices,
    check_integer,
    check_optional_integer,
    check_positive,
    setting,
)
from tandem.kvtransfer.handoff.form import WireDtype
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import CONTROL_PORT, DATA_PORTS

CONNECTORS = ("auto", "nixl", "cuda_p2p", "shm", "cuda_p2p_agent", "shm_agent", "tcp")
MEETING = ("auto", "cuda_p2p", "shm")
"""Connectors whose links depend on which process copies in a named folder."""
BY_SLOTS = ("auto", "nixl", "tcp")
"""Connectors that pack KV into slots, or may."""
NODE_COPIES = ("auto", "direct", "agent")
MIN_SLOT_BYTES = 4 << 10
MAX_PULL_PEERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Settings of a worker that exports KV to its peers and reads KV from them."""

    kv_connector: str = setting(
        "auto",
        "Transport of KV. auto: nixl or tcp; with --kv-node-folder first cuda_p2p or shm,"
        " link by link. The _agent transports copy by the node's agent.",
        choices=CONNECTORS,
    )
    kv_slot_bytes: int | None = None
    """Size of a slot; None: 128 MiB in GPU memory, 4 MiB in host memory, 32 MiB there for blocks of
    a GPU."""
    kv_slots: int = setting(
        16,
        "Slots of a worker that sends or receives KV, of each kind. Fewer take less GPU memory.",
        unit="slots",
    )
    kv_slots_per_peer: int = 8
    """Slots of either kind that one peer may hold."""
    kv_credits: int | None = None
    """Parts of one hand-off that are packed and not taken yet; None: 6 if slots lie in GPU memory,
    else 4."""
    kv_lease_seconds: float = setting(
        30.0,
        "Maximum time of a lease after the end of its prompt, or the request's deadline if "
        "earlier.",
        unit="s",
    )
    kv_lease_quota: float = 0.9
    """Share of a worker's blocks that hand-offs may hold."""
    kv_lease_backlog: float = 4.0
    """Admitted hand-offs, running or queued, in multiples of the quota."""
    kv_pull_peers: int = setting(
        0,
        "Workers from which this one may pull cached prefixes, and to which it lends its "
        "own. Each takes slots and threads. 0: none.",
        unit="workers",
    )
    kv_pull_quota: float = 0.3
    """Share of a worker's blocks that may be lent at once to peers that pull them."""
    kv_tombstone_seconds: float = 60.0
    """Time for which an ended hand-off is remembered, to answer late messages."""
    kv_expect_seconds: float = 30.0
    """Time for which the OPEN of a consumer waits until the request is admitted here."""
    kv_transfer_seconds: float = 20.0
    """Time without progress after which a load has failed. A link whose reads hang as long is
    connected again."""
    kv_commit_seconds: float = 5.0
    """Time for which a consumer waits for the answer to DONE."""
    kv_wait_seconds: float = 600.0
    """Budget of a hand-off whose request has no deadline."""
    kv_beat_seconds: float = 0.5
    """Interval of the heartbeats of a link, both ways."""
    kv_beat_timeout: float = 4.0
    """A peer that is silent for this long is lost."""
    kv_slow_seconds: float = 1.0
    """A hand-off that takes this long after its prompt, and four times the time that its bytes take
    at the best rate of its link, is logged and counted as slow."""
    kv_stall_seconds: float = 60.0
    """A peer with work whose engine and transfers stand still for this long is lost."""
    kv_connect_seconds: float = 5.0
    """Time that HELLO and the pattern probe of a peer may take."""
    kv_quarantine_seconds: float = 30.0
    """Quarantine of a link after data that failed its identity or digest."""
    kv_probe_bytes: int = 1 << 20
    """Size of the probe of a new link, at most a slot."""
    kv_control_host: str = setting(
        "127.0.0.1",
        "Address of the control socket. On loopback, KV stays on this machine.",
    )
    kv_control_port: int = setting(CONTROL_PORT, "Port of the control socket. 0: any free port.")
    kv_advertise_host: str | None = setting(
        None, "Address of this worker for its peers. Default: the control host."
    )
    kv_node_folder: str | None = setting(
        None,
        "Folder that workers of one machine share for cuda_p2p and shm; auto then tries these "
        "first. Default: a folder of the user.",
    )
    kv_node_copy: str = setting(
        "auto",
        "Process that copies KV between workers of --kv-node-folder. direct: the decode "
        "worker, which sees both GPUs; agent: tandem node-agent; auto: the first that "
        "works.",
        choices=NODE_COPIES,
    )
    kv_wire_dtype: str = setting(
        "auto",
        "Type of KV on the wire, set on either end. auto: as stored; fp8: half the bytes, "
        "tokens may differ, KV goes through slots.",
        choices=(WireDtype.AUTO, WireDtype.FP8),
    )
    kv_data_port: int = setting(
        0, f"First of {DATA_PORTS} ports to try for the tcp connector. 0: any free port."
    )
    kv_data_ports: int = DATA_PORTS
    """Number of ports to try."""
    kv_tcp_streams: int | None = None
    """Sockets and threads of the tcp connector to each peer; None: 4 for the blocks of a GPU, 2 for
    those of a CPU."""
    kv_secret: str = setting(
        "", "Secret that the workers of a service share. Peers without it are refused."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        meets = self.kv_connector in MEETING and self.kv_node_folder is not None
        if self.kv_node_copy != "auto" and not meets:
            allowed = (
                f"auto, unless kv_node_folder names a folder and kv_connector is one of "
                f"{', '.join(MEETING)}"
            )
            raise InvalidParameter("kv_node_copy", self.kv_node_copy, allowed)
        if self.kv_wire_dtype != WireDtype.AUTO and self.kv_connector not in BY_SLOTS:
            allowed = f"auto, unless kv_connector is one of {', '.join(BY_SLOTS)}"
            raise InvalidParameter("kv_wire_dtype", self.kv_wire_dtype, allowed)
        check_optional_integer("kv_slot_bytes", self.kv_slot_bytes, MIN_SLOT_BYTES)
        check_optional_integer("kv_credits", self.kv_credits, 1)
        for name in ("kv_slots", "kv_slots_per_peer"):
            check_integer(name, getattr(self, name), 1)
        check_integer("kv_probe_bytes", self.kv_probe_bytes, 64)
        for name in ("kv_control_port", "kv_data_port"):
            check_integer(name, getattr(self, name), 0, 65535)
        check_integer("kv_data_ports", self.kv_data_ports, 1, 65535)
        check_optional_integer("kv_tcp_streams", self.kv_tcp_streams, 1, 16)
        for each in fields(self):
            if each.name.endswith(("_seconds", "_timeout")) or each.name == "kv_lease_backlog":
                check_positive(each.name, getattr(self, each.name))
        check_positive("kv_lease_quota", self.kv_lease_quota, 1.0)
        check_positive("kv_pull_quota", self.kv_pull_quota, 1.0)
        check_integer("kv_pull_peers", self.kv_pull_peers, 0, MAX_PULL_PEERS)
        if self.kv_beat_timeout < 2 * self.kv_beat_seconds:
            raise InvalidParameter(
                "kv_beat_timeout",
                self.kv_beat_timeout,
                f"at least two beats, {2 * self.kv_beat_seconds:g} s",
            )


def millis(seconds: float) -> int:
    """Return seconds as milliseconds."""
    return max(1, round(seconds * 1000))
