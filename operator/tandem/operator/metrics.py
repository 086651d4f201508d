"""Metrics of the operator itself, under ``tandem_operator:``."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_STATUSES = ("0", "403", "404", "409", "422", "429", "500", "503", "504", "bug")
"""Statuses of failures with a series from the start."""


class OperatorMetrics:
    """Metrics of one process, in its own registry."""

    def __init__(self, repaired: Iterable[str] = ()) -> None:
        """``repaired``: kinds of children that may be repaired."""
        self.registry = CollectorRegistry()
        prefix, registry = "tandem_operator:", self.registry
        self.duration = Histogram(
            f"{prefix}reconcile_seconds",
            "Time of a reconcile pass.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.errors = Counter(
            f"{prefix}reconcile_errors",
            "Failed reconcile passes, by HTTP status (0: not reached).",
            ["status"],
            registry=registry,
        )
        for status in _STATUSES:  # a series that begins at 1 shows no increase
            self.errors.labels(status)
        self.depth = Gauge(f"{prefix}queue_depth", "Services in the queue.", registry=registry)
        self.last_success = Gauge(
            f"{prefix}last_success_timestamp_seconds",
            "Time of the last successful reconcile pass.",
            registry=registry,
        )
        self.leader = Gauge(f"{prefix}leader", "1 while this replica leads.", registry=registry)
        self.events = Counter(
            f"{prefix}watch_events", "Watch events, by kind.", ["kind"], registry=registry
        )
        self.lists = Counter(
            f"{prefix}lists", "Periodic lists, by outcome.", ["outcome"], registry=registry
        )
        for outcome in ("ok", "error"):
            self.lists.labels(outcome)
        self.repairs = Counter(
            f"{prefix}repairs",
            "Deleted or edited children that were restored at once, by kind.",
            ["kind"],
            registry=registry,
        )
        for kind in repaired:
            self.repairs.labels(kind)
        self.silent_routers = Counter(
            f"{prefix}silent_routers",
            "Ready routers removed from Services because their node did not answer.",
            registry=registry,
        )
        self.objects = Gauge(
            f"{prefix}cached_objects", "Services and children held in memory.", registry=registry
        )
        self.undeclared_fields = Gauge(
            f"{prefix}undeclared_status_fields",
            "Status fields that the cluster's older CRDs lack.",
            registry=registry,
        )
        self.services = Gauge(
            f"{prefix}services",
            "LLMServices last listed; -1 before the first list, as of a standby.",
            registry=registry,
        )
        self.services.set(-1)  # 0 would be an idle operator

    def text(self) -> bytes:
        return generate_latest(self.registry)
