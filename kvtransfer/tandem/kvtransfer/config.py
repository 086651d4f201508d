"""Settings of the KV hand-off, each with the words that ``--help`` shows.

A field's metadata has the form that the engine's settings have, so that cli/ makes flags of both.
"""

import math
from dataclasses import dataclass, field, fields
from typing import TypeVar

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import CONTROL_PORT

_Value = TypeVar("_Value")

CONNECTORS = ("auto", "nixl", "tcp", "memory")
MIN_SLOT_BYTES = 4 << 10


def _setting(default: _Value, text: str, unit: str = "", choices: tuple[str, ...] = ()) -> _Value:
    value: _Value = field(default=default, metadata={"setting": (text, choices, unit)})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """How a worker exports KV to its peers and takes KV from them."""

    kv_connector: str = _setting(
        "auto", "Mover of KV bytes; auto is nixl, and tcp where nixl cannot load.", "", CONNECTORS
    )
    kv_slot_bytes: int = _setting(
        4 << 20,
        "Size of a send or receive slot; raised to one KV block and its header if below.",
        "bytes",
    )
    kv_send_slots: int = _setting(16, "Send slots of a worker that exports KV.", "slots")
    kv_receive_slots: int = _setting(16, "Receive slots of a worker that takes KV.", "slots")
    kv_slots_per_peer: int = _setting(
        8, "Slots of either kind that one peer may hold; less than all, so that none starves.", ""
    )
    kv_credits: int = _setting(
        4, "Parts of one hand-off that may be packed and not yet taken.", "parts"
    )
    kv_lease_seconds: float = _setting(
        30.0, "Hard cap of a lease after the prompt is done; the request's budget if less.", "s"
    )
    kv_lease_quota: float = _setting(
        0.9, "Share of a worker's blocks that hand-offs may hold; 0.3 where it also decodes."
    )
    kv_lease_backlog: float = _setting(
        4.0, "Admitted hand-offs, running or queued, in multiples of the quota.", "quotas"
    )
    kv_tombstone_seconds: float = _setting(
        60.0, "How long an ended hand-off is remembered, to answer what comes late.", "s"
    )
    kv_expect_seconds: float = _setting(
        30.0, "How long a consumer's OPEN waits for the request to be admitted here.", "s"
    )
    kv_transfer_seconds: float = _setting(
        20.0, "A load that makes no progress for this long, with parts due, has failed.", "s"
    )
    kv_commit_seconds: float = _setting(
        5.0, "How long a consumer waits for the answer to DONE.", "s"
    )
    kv_wait_seconds: float = _setting(
        600.0, "Budget of a hand-off whose request has no deadline.", "s"
    )
    kv_beat_seconds: float = _setting(0.5, "Interval of a link's beats, both ways.", "s")
    kv_beat_timeout: float = _setting(4.0, "A peer silent for this long is lost.", "s")
    kv_stall_seconds: float = _setting(
        60.0, "A peer with work whose engine and transfers stand still this long is lost.", "s"
    )
    kv_connect_seconds: float = _setting(
        5.0, "How long a peer may take over HELLO and the pattern probe.", "s"
    )
    kv_quarantine_seconds: float = _setting(
        30.0, "How long a link rests after data that failed its identity or digest.", "s"
    )
    kv_probe_bytes: int = _setting(
        1 << 20, "Known pattern that a new link must deliver; cut to the slot size.", "bytes"
    )
    kv_control_host: str = _setting("127.0.0.1", "Address that the control socket binds.")
    kv_control_port: int = _setting(CONTROL_PORT, "Port of the control socket; 0 takes any free.")
    kv_advertise_host: str | None = _setting(
        None, "Address under which peers reach this worker; none is the control host."
    )
    kv_data_port: int = _setting(0, "First port to try for the tcp connector; 0 takes any free.")
    kv_data_ports: int = _setting(16, "How many ports to try from the first on.", "ports")
    kv_secret: str = _setting(
        "", "Shared by the workers of a service; peers without it are turned away."
    )

    def __post_init__(self) -> None:
        if self.kv_connector not in CONNECTORS:
            raise InvalidParameter(
                "kv_connector", self.kv_connector, f"one of {', '.join(CONNECTORS)}"
            )
        _integer("kv_slot_bytes", self.kv_slot_bytes, MIN_SLOT_BYTES)
        for name in ("kv_send_slots", "kv_receive_slots", "kv_slots_per_peer", "kv_credits"):
            _integer(name, getattr(self, name), 1)
        _integer("kv_probe_bytes", self.kv_probe_bytes, 64)
        for name in ("kv_control_port", "kv_data_port"):
            _integer(name, getattr(self, name), 0, 65535)
        _integer("kv_data_ports", self.kv_data_ports, 1, 65535)
        for each in fields(self):
            if each.name.endswith(("_seconds", "_timeout")) or each.name == "kv_lease_backlog":
                _positive(each.name, getattr(self, each.name))
        _positive("kv_lease_quota", self.kv_lease_quota, 1.0)
        if self.kv_beat_timeout < 2 * self.kv_beat_seconds:
            raise InvalidParameter(
                "kv_beat_timeout",
                self.kv_beat_timeout,
                f"at least two beats, {2 * self.kv_beat_seconds:g} s",
            )


def millis(seconds: float) -> int:
    """Seconds of a setting as the machines count them."""
    return max(1, round(seconds * 1000))


def _integer(param: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer, {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(param, value, allowed)
    if value < low or (high is not None and value > high):
        raise InvalidParameter(param, value, allowed)


def _positive(param: str, value: object, high: float = math.inf) -> None:
    allowed = "a number above 0" if high == math.inf else f"a number above 0 and at most {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
        raise InvalidParameter(param, value, allowed)
