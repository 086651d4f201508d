"""Metrics of a worker's links to routers."""

from prometheus_client import CollectorRegistry, Counter, Gauge

DROPS = ("router gone", "garbage", "reset")
"""Why a frame is dropped."""


class LinkMetrics:
    """Counts what the I/O thread drops and how many routers it serves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._dropped = Counter(
            "tandem:link_frames_dropped",
            "Dropped frames between router and worker, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in DROPS:  # of a series that begins at 1 no increase is seen
            self._dropped.labels(reason)
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
