"""Settings of the KV hand-off. Those with a help text are flags, the others constants."""

from dataclasses import dataclass, fields

from tandem.kvtransfer.handoff.form import WireDtype
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import CONTROL_PORT
from tandem.protocol.settings import (
    check_choices,
    check_integer,
    check_optional_integer,
    check_positive,
    setting,
)

CONNECTORS = ("auto", "nixl", "cuda_p2p", "shm", "cuda_p2p_agent", "shm_agent", "tcp")
MEETING = ("auto", "cuda_p2p", "shm")
"""Connectors whose links depend on which process copies in a named folder."""
BY_SLOTS = ("auto", "nixl", "tcp")
"""Connectors that pack KV into slots, or may."""
NODE_COPIES = ("auto", "direct", "agent")
PREFLIGHTS = ("off", "warn", "require")
MIN_SLOT_BYTES = 4 << 10
MAX_PULL_PEERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Settings of a worker that exports KV to its peers and reads KV from them."""

    kv_connector: str = setting(
        "auto",
        "Mover of KV bytes; auto is nixl, and tcp where nixl cannot load; with --kv-node-folder it "
        "is cuda_p2p (on GPUs) or shm (on CPUs) first, link by link. cuda_p2p and shm are for "
        "workers of one machine: a decode worker maps its peers' memory, of GPUs or of the host, "
        "and copies blocks itself; cuda_p2p_agent and shm_agent have the agent of the node copy "
        "for it (tandem node-agent). With --kv-node-folder cuda_p2p and shm are either, as "
        "--kv-node-copy says, and nothing else.",
        choices=CONNECTORS,
    )
    kv_slot_bytes: int | None = setting(
        None,
        "Size of a send or receive slot; raised to one KV block and its header if below. None is "
        "128 MiB where slots lie in GPU memory (less on a GPU of under 128 GiB), 4 MiB in the "
        "host's, and 32 MiB there for a GPU's blocks.",
        unit="bytes",
    )
    kv_send_slots: int = setting(16, "Send slots of a worker that exports KV.", unit="slots")
    kv_receive_slots: int = setting(16, "Receive slots of a worker that takes KV.", unit="slots")
    kv_slots_per_peer: int = 8
    """Slots of either kind that one peer may hold."""
    kv_credits: int | None = None
    """Parts of one hand-off that are packed and not taken yet; None: 6 if slots lie in GPU memory,
    else 4."""
    kv_lease_seconds: float = setting(
        30.0,
        "Hard cap of a lease after the prompt is done; the request's budget if less.",
        unit="s",
    )
    kv_lease_quota: float = setting(
        0.9, "Share of a worker's blocks that hand-offs may hold; 0.3 where it also decodes."
    )
    kv_lease_backlog: float = 4.0
    """Admitted hand-offs, running or queued, in multiples of the quota."""
    kv_pull_peers: int = setting(
        0,
        "Other workers of the service to which this one keeps links, so that it can pull the start "
        "of a prompt that they have cached where that is sooner than computing it; it lends to "
        "others alike. 0 does neither. Takes slots and threads once more, as a hand-off does.",
        unit="workers",
    )
    kv_pull_quota: float = 0.3
    """Share of a worker's blocks that may be lent at once to peers that pull them."""
    kv_tombstone_seconds: float = 60.0
    """Time for which an ended hand-off is remembered, to answer late messages."""
    kv_expect_seconds: float = 30.0
    """Time for which the OPEN of a consumer waits until the request is admitted here."""
    kv_transfer_seconds: float = setting(
        20.0,
        "A load that makes no progress for this long, with parts due, has failed; a link on which "
        "a read hangs for so long, and no later one ends, is made again.",
        unit="s",
    )
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
    kv_quarantine_seconds: float = setting(
        30.0,
        "How long a link is quarantined after data that failed its identity or digest.",
        unit="s",
    )
    kv_probe_bytes: int = setting(
        1 << 20, "Known pattern that a new link must deliver; cut to the slot size.", unit="bytes"
    )
    kv_preflight: str = setting(
        "warn",
        "What becomes of a link whose pattern comes slower than --kv-min-megabytes-per-second: "
        "warn says so, require does not use it (auto goes on to the next connector), off does "
        "nothing.",
        choices=PREFLIGHTS,
    )
    kv_min_megabytes_per_second: int | None = setting(
        None,
        "Rate that a new link must give, by the best of three reads of its pattern; none: any. A "
        "fast link requires more --kv-probe-bytes: a short read mostly waits.",
        unit="MB/s",
    )
    kv_control_host: str = setting(
        "127.0.0.1",
        "Address that the control socket binds; on the loopback KV stays on this machine, too.",
    )
    kv_control_port: int = setting(CONTROL_PORT, "Port of the control socket; 0 takes any free.")
    kv_advertise_host: str | None = setting(
        None, "Address under which peers reach this worker; none is the control host."
    )
    kv_node_folder: str | None = setting(
        None,
        "Folder in which workers of one machine meet for cuda_p2p and shm, the same for all of "
        "them; none is a folder of this user's own among the temporary files. Named, it has auto "
        "try cuda_p2p or shm first; tandem up names one where workers have GPUs.",
    )
    kv_node_copy: str = setting(
        "auto",
        "Who copies KV between workers that meet in --kv-node-folder, where --kv-connector is "
        "auto, cuda_p2p or shm: direct, the decode worker, which has to see both GPUs; agent, the "
        "node's agent (tandem node-agent), which alone has to; auto tries one, then the other, "
        "link by link.",
        choices=NODE_COPIES,
    )
    kv_wire_dtype: str = setting(
        "auto",
        "Type in which KV travels; auto is the one in which it is held, fp8 is float8_e4m3 with a "
        "scale for each head of K and V of each layer in each block: half the bytes of bfloat16, "
        "and other tokens now and then. It holds for a link if either end asks for it, and only "
        "where KV goes through slots: auto leaves out what maps memory.",
        choices=tuple(WireDtype),
    )
    kv_data_port: int = setting(0, "First port to try for the tcp connector; 0 takes any free.")
    kv_data_ports: int = setting(16, "How many ports to try from the first on.", unit="ports")
    kv_tcp_streams: int | None = None
    """Sockets and threads of the tcp connector to each peer; None: 4 for the blocks of a GPU, 2 for
    those of a CPU."""
    kv_secret: str = setting(
        "", "Shared by the workers of a service; peers without it are turned away."
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
        for name in ("kv_send_slots", "kv_receive_slots", "kv_slots_per_peer"):
            check_integer(name, getattr(self, name), 1)
        check_integer("kv_probe_bytes", self.kv_probe_bytes, 64)
        least = self.kv_min_megabytes_per_second
        check_optional_integer("kv_min_megabytes_per_second", least, 1)
        if self.kv_preflight == "require" and least is None:
            allowed = "off or warn, unless kv_min_megabytes_per_second says what is required"
            raise InvalidParameter("kv_preflight", self.kv_preflight, allowed)
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
    """Return a setting's seconds as milliseconds."""
    return max(1, round(seconds * 1000))
