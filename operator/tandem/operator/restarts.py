"""How often containers of services have ended, as totals that only grow: pods come and go.

A sum over the pods that there are would fall with each that goes, which Prometheus takes for a
counter that began anew. Called by ``service_gauges`` at each scrape.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from tandem.operator.cluster.store import Key
from tandem.operator.desired.naming import Manifest
from tandem.protocol.names import LABEL_COMPONENT, LABEL_ROLE, LABEL_SERVICE

_REMEMBERED = 50_000
"""Containers whose pods are gone; one that only seemed so is not counted twice."""
_Container = tuple[str, str]
"""UID of its pod, and its name."""
Total = tuple[Key, str]
"""A service and a role; ``model`` is what fetches it."""


class Restarts:
    """Thread-safe."""

    def __init__(self) -> None:
        self._seen: OrderedDict[_Container, int] = OrderedDict()
        self._totals: Counter[Total] = Counter()
        self._lock = threading.Lock()

    def look(self, pods: Iterable[Manifest], services: set[Key]) -> dict[Total, int]:
        """Totals of ``services`` after what the pods say; those of others are forgotten."""
        with self._lock:
            num_now = 0
            for total, container, count in _counts(pods):
                num_now += 1
                self._totals[total] += max(0, count - self._seen.get(container, 0))
                self._seen[container] = count
                self._seen.move_to_end(container)
            while len(self._seen) > num_now + _REMEMBERED:
                self._seen.popitem(last=False)
            for total in [each for each in self._totals if each[0] not in services]:
                del self._totals[total]
            return dict(self._totals)


def _counts(pods: Iterable[Manifest]) -> Iterator[tuple[Total, _Container, int]]:
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        place = (metadata["namespace"], labels.get(LABEL_SERVICE, ""))
        role = labels.get(LABEL_ROLE) or labels.get(LABEL_COMPONENT, "")
        for field in ("initContainerStatuses", "containerStatuses"):
            for each in status.get(field) or ():
                yield (place, role), (metadata["uid"], each["name"]), each.get("restartCount", 0)
