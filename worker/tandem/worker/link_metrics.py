"""Metrics of a worker's links to routers."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class LinkMetrics:
    """Counts what the I/O thread drops and how many routers it serves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._dropped = Counter(
            "tandem:link_frames_dropped",
            "Frames between router and worker that were dropped, by reason.",
            ["reason"],
            registry=registry,
        )
        self._routers = Gauge(
            "tandem:routers_connected",
            "Routers with a live link to this worker.",
            registry=registry,
        )

    def dropped(self, reason: str) -> None:
        """One frame was not delivered."""
        self._dropped.labels(reason).inc()

    def routers(self, count: int) -> None:
        """Routers connected now."""
        self._routers.set(count)
