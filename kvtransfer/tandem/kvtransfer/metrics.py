"""Prometheus metrics of the hand-off, under ``tandem:``, with a label for the role."""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.protocol.errors import FailCause

PHASE_BUCKETS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
RATE_BUCKETS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 3e11)


_SIDES = {"producer": "p", "consumer": "d"}


class HandoffMetrics:
    """Metrics of one registry; made by ``metrics_of``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.phase = Histogram(
            "tandem:kv_handoff_phase_seconds",
            "Phases of a hand-off: pack (P); wait (OPEN to READY), reserve (READY to WANT), "
            "read, unpack (with verification), commit, load (WANT to committed), tail (end of the "
            "prompt to committed) (D).",
            ["phase"],
            registry=registry,
            buckets=PHASE_BUCKETS,
        )
        self.bytes = Counter(
            "tandem:kv_handoff_bytes", "KV bytes packed or read.", ["role"], registry=registry
        )
        self.parts = Counter(
            "tandem:kv_handoff_parts", "Parts packed or read.", ["role"], registry=registry
        )
        self.endings = Counter(
            "tandem:kv_handoffs",
            "Finished hand-offs, by outcome.",
            ["role", "outcome"],
            registry=registry,
        )
        self.failures = Counter(
            "tandem:kv_handoff_failures",
            "Hand-offs that failed, by cause.",
            ["role", "cause"],
            registry=registry,
        )
        self.slow = Counter(
            "tandem:kv_slow_handoffs",
            "Hand-offs slower than their link allows, by the phase in which they waited.",
            ["phase"],
            registry=registry,
        )
        self.waiting_bytes = Gauge(
            "tandem:kv_waiting_bytes",
            "KV that prefill workers announced and that has not arrived.",
            registry=registry,
        )
        self.slots = Gauge(
            "tandem:kv_slots", "Transfer slots by state.", ["role", "state"], registry=registry
        )
        self.leases = Gauge("tandem:kv_leases", "Exports with a lease.", registry=registry)
        self.leased_blocks = Gauge(
            "tandem:kv_leased_blocks", "Blocks under a lease for consumers.", registry=registry
        )
        self.stray = Counter(
            "tandem:kv_stray_events",
            "Late, repeated or unknown messages and events.",
            ["what"],
            registry=registry,
        )
        self.garbage = Counter(
            "tandem:kv_garbage_frames",
            "Frames that violate the protocol, by port.",
            ["port"],
            registry=registry,
        )
        self.links = Gauge(
            "tandem:kv_links", "Links to peers in state up.", ["role"], registry=registry
        )
        self.links_lost = Counter(
            "tandem:kv_links_lost", "Links that broke.", ["role"], registry=registry
        )
        self.turned_away = Counter(
            "tandem:kv_links_refused", "Refused HELLO messages.", registry=registry
        )
        self.uncut_links = Counter(
            "tandem:kv_links_uncut",
            "Links on another transport because this one does not support their block sizes.",
            ["connector"],
            registry=registry,
        )
        self.links_fallen = Gauge(
            "tandem:kv_links_fallen",
            "Links on a slower transport than this one, after a failure or before its first use.",
            ["connector"],
            registry=registry,
        )
        self.probe_rate = Histogram(
            "tandem:kv_link_probe_bytes_per_second",
            "Rate of the probe of a new link.",
            registry=registry,
            buckets=RATE_BUCKETS,
        )
        self.transport = Gauge(
            "tandem:kv_transport_info",
            "Preferred transport; fallback is 1 if a faster one could not load or be served.",
            ["role", "connector", "fallback"],
            registry=registry,
        )
        # A look-up by labels is slow, and each hand-off waits for ten.
        self.phase_of = cache(self.phase.labels)
        self.bytes_of = cache(self.bytes.labels)
        self.parts_of = cache(self.parts.labels)
        self.endings_of = cache(self.endings.labels)
        self.slots_of = cache(self.slots.labels)

    def moved(self, role: str, nbytes: int) -> None:
        self.bytes_of(role).inc(nbytes)
        self.parts_of(role).inc()

    def start(self, role: str) -> None:
        """Begin counters of failures at 0, so that their first increase is seen."""
        for cause in FailCause:
            self.failures.labels(role, cause)
        self.links_lost.labels(role)
        self.stray.labels(f"{_SIDES[role]}:message of an old link")
        for port in ("data", "control"):
            self.garbage.labels(port)


_metrics: WeakKeyDictionary[CollectorRegistry, HandoffMetrics] = WeakKeyDictionary()


def metrics_of(registry: CollectorRegistry) -> HandoffMetrics:
    """Return the metrics of a registry, made once for producer and consumer."""
    found = _metrics.get(registry)
    if found is None:
        found = _metrics[registry] = HandoffMetrics(registry)
    return found
