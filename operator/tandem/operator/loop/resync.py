"""The periodic list: every service is looked at anew, whatever watches said or did not say.

Its freshness is what liveness means. Called by ``run`` in a thread while this replica leads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

_RETRY = 2.0


class Resync:
    """Lists services every ``resync_seconds`` and wakes each."""

    def __init__(
        self,
        cluster: Cluster,
        settings: OperatorSettings,
        wake: Callable[[tuple[str, str]], None],
        metrics: OperatorMetrics,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._wake = wake
        self._metrics = metrics
        self._good: float | None = None

    def age(self) -> float:
        """Seconds since the last list that went well, or since ``run`` began; 0 before that: a
        standby lists nothing, however long it waits."""
        return 0.0 if self._good is None else time.monotonic() - self._good

    def run(self, stop: threading.Event) -> None:
        """List until ``stop``."""
        self._good = time.monotonic()
        while not stop.is_set():
            stop.wait(self._settings.resync_seconds if self._once() else _RETRY)

    def _once(self) -> bool:
        try:
            found = [
                item["metadata"]
                for namespace in self._settings.namespaces or (None,)
                for item in self._cluster.items("LLMService", namespace)
            ]
        except ClusterError as error:
            self._metrics.lists.labels("error").inc()
            logger.warning("the list of services: %s", error)
            return False
        self._good = time.monotonic()
        self._metrics.lists.labels("ok").inc()
        self._metrics.services.set(len(found))
        for metadata in found:
            self._wake((metadata["namespace"], metadata["name"]))
        return True
