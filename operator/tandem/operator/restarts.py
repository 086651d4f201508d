"""Restarts of services' containers, as totals that only grow while pods come and go.

A sum over the existing pods would fall with each that is deleted, and Prometheus would take that
for a counter that began again. Restarts before this process are not counted: a restart of the
operator would look like restarts of all its services. Called by ``service_gauges`` at each scrape.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from tandem.operator.clock import parse_time
from tandem.operator.cluster.store import Key
from tandem.operator.desired.naming import Manifest
from tandem.protocol.names import LABEL_COMPONENT, LABEL_ROLE, LABEL_SERVICE

_REMEMBERED = 50_000
"""Remembered containers of deleted pods; one that only seemed deleted is not counted twice."""
_Container = tuple[str, str]
"""UID of its pod, and its name."""
Total = tuple[Key, str]
"""A service and a role; ``model`` is the role of the container that fetches it."""


class Restarts:
    """Totals of restarts. Thread-safe."""

    def __init__(self) -> None:
        self._since = time.time()
        self._has_looked = False
        """Whether a look has found any pod yet."""
        self._seen: OrderedDict[_Container, int] = OrderedDict()
        self._totals: Counter[Total] = Counter()
        self._lock = threading.Lock()

    def look(self, pods: Iterable[Manifest], services: set[Key]) -> dict[Total, int]:
        """Return the totals of ``services`` after the pods' counts; others are forgotten."""
        with self._lock:
            num_now = 0
            for total, container, count, created in _counts(pods):
                num_now += 1
                # Lists come one after the other: an older pod may be met in a later look.
                is_old = not self._has_looked or created < self._since
                before = self._seen.get(container, count if is_old else 0)
                self._totals[total] += max(0, count - before)
                self._seen[container] = count
                self._seen.move_to_end(container)
            self._has_looked = self._has_looked or num_now > 0
            while len(self._seen) > num_now + _REMEMBERED:
                self._seen.popitem(last=False)
            for total in [each for each in self._totals if each[0] not in services]:
                del self._totals[total]
            return dict(self._totals)


def _counts(pods: Iterable[Manifest]) -> Iterator[tuple[Total, _Container, int, float]]:
    """Yield each container's total, key, restarts, and the creation time of its pod."""
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        place = (metadata["namespace"], labels.get(LABEL_SERVICE, ""))
        created = metadata.get("creationTimestamp")
        at = time.time() if created is None else parse_time(created)
        role = labels.get(LABEL_ROLE) or labels.get(LABEL_COMPONENT, "")
        for field in ("initContainerStatuses", "containerStatuses"):
            for each in status.get(field) or ():
                container = (metadata["uid"], each["name"])
                yield (place, role), container, each.get("restartCount", 0), at
