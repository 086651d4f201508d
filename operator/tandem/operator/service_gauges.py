"""Series of each service: conditions, replicas, links, keys, restarts.

They are read from the store at each scrape. Beyond a bound, services are only counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.operator.api import service
from tandem.operator.api.status import LLMServiceStatus
from tandem.operator.clock import parse_time
from tandem.operator.cluster.store import SERVICE, Key, Store
from tandem.operator.desired.naming import Manifest
from tandem.protocol.names import LABEL_COMPONENT, LABEL_ROLE, LABEL_SERVICE

_REMEMBERED = 50_000
"""Maximum remembered containers of deleted pods."""
_Container = tuple[str, str]
"""UID of its pod, and its name."""
Total = tuple[Key, str]
"""Service and role; ``model`` is the role of the fetching container."""


class Restarts:
    """Totals of restarts. Thread-safe."""

    def __init__(self) -> None:
        self._since = time.time()
        self._has_looked = False
        """Whether a pass has found a pod."""
        self._seen: OrderedDict[_Container, int] = OrderedDict()
        self._totals: Counter[Total] = Counter()
        self._lock = threading.Lock()

    def look(self, pods: Iterable[Manifest], services: set[Key]) -> dict[Total, int]:
        """Return the totals of ``services`` with the pods' counts; others are dropped."""
        with self._lock:
            num_now = 0
            for total, container, count, created in _counts(pods):
                num_now += 1
                # An older pod may appear in a later list.
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
    """Yield each container's total, key, restarts, and its pod's creation time."""
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


MAX_SERVICES = 500
"""Maximum services with series, of about thirty each."""
_OWN = ("llmservice_namespace", "llmservice")
_TRUTH = {"True": 1.0, "False": 0.0}
_UNKNOWN = -1.0


class ServiceGauges(Collector):
    """Series of all services, made for each scrape."""

    def __init__(self, store: Store, most: int = MAX_SERVICES) -> None:
        """Export series of at most ``most`` services."""
        self._store = store
        self._most = most
        self._restarts = Restarts()

    def describe(self) -> Iterator[Metric]:
        """Return empty families: the registry asks before there is a service."""
        yield from _families()

    def collect(self) -> Iterator[Metric]:
        condition, replicas, links, keys, restarts, left_out = _families()
        shown = {}
        services = sorted(self._store.all(SERVICE), key=_place)
        for item in services[: self._most]:
            shown[_place(item)] = service.status_of(item)
        for place, status in shown.items():
            for each in status.conditions:
                value = _TRUTH.get(each.status, _UNKNOWN)
                condition.add_metric((*place, each.type, each.reason), value)
            for (role, state), number in _replicas(status).items():
                replicas.add_metric((*place, role, state), number)
            if status.links is not None:
                links.add_metric((*place, "healthy"), status.links.healthy)
                links.add_metric((*place, "expected"), status.links.total)
            if status.keys.published_at is not None:
                keys.add_metric(place, parse_time(status.keys.published_at))
        totals = self._restarts.look(self._store.all("Pod"), {_place(item) for item in services})
        for (place, role), number in totals.items():
            if place in shown:
                restarts.add_metric((*place, role), number)
        left_out.add_metric((), max(0, len(services) - self._most))
        yield from (condition, replicas, links, keys, restarts, left_out)


def _families() -> tuple[
    GaugeMetricFamily,
    GaugeMetricFamily,
    GaugeMetricFamily,
    GaugeMetricFamily,
    CounterMetricFamily,
    GaugeMetricFamily,
]:
    prefix = "tandem_operator:"
    return (
        GaugeMetricFamily(
            f"{prefix}service_condition",
            "Conditions of services with their reason: 1 true, 0 false, -1 unknown.",
            labels=(*_OWN, "type", "reason"),
        ),
        GaugeMetricFamily(
            f"{prefix}service_replicas",
            "Replicas of a role over all revisions: desired, ready, draining.",
            labels=(*_OWN, "role", "state"),
        ),
        GaugeMetricFamily(
            f"{prefix}service_links",
            "KV links of a service: healthy links, and pairs of prefill and decode workers.",
            labels=(*_OWN, "state"),
        ),
        GaugeMetricFamily(
            f"{prefix}service_keys_published_timestamp_seconds",
            "Time when the newest keys of a service's links were published.",
            labels=_OWN,
        ),
        CounterMetricFamily(
            f"{prefix}service_restarts",
            "Restarts of containers, by role; model is the container that fetches it.",
            labels=(*_OWN, "role"),
        ),
        GaugeMetricFamily(
            f"{prefix}services_not_shown", "Services without series, beyond the limit."
        ),
    )


def _replicas(status: LLMServiceStatus) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for role in status.roles:
        for state in ("desired", "ready", "draining"):
            found[role.name, state] += getattr(role, state)
    return found


def _place(item: Manifest) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]
