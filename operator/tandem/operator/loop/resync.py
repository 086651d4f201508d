"""Periodic lists, which find changes that no watch reported; every service is reconciled.

One list per kind and namespace in every period, in pages. Liveness is their age. A namespace that
refuses its lists twice is skipped until it allows them again.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections.abc import Callable

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.store import CHILDREN, KINDS, SERVICE, Key, Store
from tandem.operator.desired.naming import Manifest
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.settings import OperatorSettings
from tandem.protocol.names import LABEL_SERVICE

logger = logging.getLogger(__name__)

PAGE = 500
_RETRY = 2.0
_EXPIRED = 410
_SHUT = (403, 404)
_ASK_SHUT = (5.0, 10.0)
"""Minimum and maximum seconds after which a skipped namespace is tried again."""
_SPREAD = 0.9
"""Share of a period over which its passes are spread."""

Place = tuple[str, str | None]
"""Kind, and namespace or None for the cluster."""


class Resync:
    """Lists of every kind, once in ``resync_seconds``; they wake services."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        settings: OperatorSettings,
        wake: Callable[..., None],
        metrics: OperatorMetrics,
    ) -> None:
        """``wake`` takes a service and the seconds until its pass."""
        self._cluster = cluster
        self._store = store
        self._period = settings.resync_seconds
        self._wake = wake
        self._metrics = metrics
        self._places: list[Place] = [
            (kind, namespace) for kind in KINDS for namespace in settings.namespaces or (None,)
        ]
        self._namespaces = settings.namespaces
        self._shut: frozenset[str] = frozenset()
        """Namespaces whose services may not be listed."""
        self._refused: dict[str, float] = {}
        """First refusals of namespaces without a later successful list."""
        self._good: dict[Place, float] = {}
        self.filled = threading.Event()
        """Set after everything was listed: passes may begin."""

    def age(self) -> float:
        """Return the seconds since the oldest of the last lists; 0 before ``run``."""
        now, shut = time.monotonic(), self._shut
        good = dict(self._good)
        return now - min((at for (_, where), at in good.items() if where not in shut), default=now)

    def served(self) -> tuple[str, ...]:
        """Return the watched namespaces that may be listed; none if all are watched."""
        shut = self._shut
        return tuple(each for each in self._namespaces if each not in shut)

    def run(self, stop: threading.Event) -> None:
        """List until ``stop``: all at once first, then in turns."""
        began = time.monotonic()
        self._good = dict.fromkeys(self._places, began)
        due = [(began, number) for number in range(len(self._places))]
        unseen = set(self._places)
        while due and not stop.wait(max(0.0, due[0][0] - time.monotonic())):
            _, number = heapq.heappop(due)
            place = self._places[number]
            first = place in unseen
            wait = self._period if self._once(place) else _RETRY
            if wait == self._period:
                unseen.discard(place)
            if first and wait == self._period:  # from now on in turns
                wait = self._period * (number + 1) / len(self._places)
            if place[0] == SERVICE and place[1] in self._shut:
                wait = min(wait, random.uniform(*_ASK_SHUT))
            heapq.heappush(due, (time.monotonic() + wait, number))
            if not unseen:
                self.filled.set()

    def _once(self, place: Place) -> bool:
        """List one kind, if allowed; return whether it succeeded."""
        kind, namespace = place
        opens = namespace in self._shut
        if opens and kind != SERVICE:
            return True  # with its services, when these answer
        try:
            items, version = self._list(kind, namespace)
        except ClusterError as error:
            self._metrics.lists.labels("error").inc()
            shut = error.status in _SHUT and self._is_shut(place)
            if not (shut and opens):  # logged once
                logger.warning("the list of %s in %s: %s", kind, namespace or "the cluster", error)
            if shut and namespace is not None and not opens:
                logger.warning("namespace %s is left out until it answers", namespace)
                self._shut |= {namespace}
            return shut
        if opens and namespace is not None and not self._open(namespace):
            return False
        self._took(place, items, version)
        return True

    def _is_shut(self, refused: Place) -> bool:
        """Return whether a namespace refused twice: kopf ends after refusals within a minute."""
        kind, namespace = refused
        if namespace is None:
            return False
        if namespace in self._shut:
            return True
        now = time.monotonic()
        first = self._refused.get(namespace, now)
        if first < now < first + _RETRY:
            return False  # an older refusal is tried again soon
        if kind != SERVICE and not self._refuses_services(namespace):
            return False
        self._refused.setdefault(namespace, now)
        return now >= first + _RETRY

    def _refuses_services(self, namespace: str) -> bool:
        try:
            self._cluster.page(SERVICE, namespace, selector="", limit=1, token="")
        except ClusterError as error:
            return error.status in _SHUT
        return False

    def _open(self, namespace: str) -> bool:
        """List all children of a namespace that answers again; return whether it succeeded."""
        try:
            for kind in CHILDREN:
                self._took((kind, namespace), *self._list(kind, namespace))
        except ClusterError as error:
            self._metrics.lists.labels("error").inc()
            logger.warning("namespace %s answers in part: %s", namespace, error)
            return False
        logger.warning("namespace %s answers again", namespace)
        self._good[(SERVICE, namespace)] = time.monotonic()
        self._shut -= {namespace}
        return True

    def _took(self, place: Place, items: list[Manifest], version: str) -> None:
        """Store a list, and wake the services that it changed."""
        kind, namespace = place
        changed = self._store.replace(kind, namespace, items, version)
        self._good[place] = time.monotonic()
        self._refused.pop(namespace or "", None)
        self._metrics.lists.labels("ok").inc()
        self._metrics.objects.set(self._store.size())
        for key in changed:
            self._wake(key)
        if kind == SERVICE:
            self._look_at(items, changed)

    def _look_at(self, services: list[Manifest], woken: set[Key]) -> None:
        """Schedule each service once in this period."""
        self._metrics.services.set(self._store.count(SERVICE))
        for item in services:
            key = (item["metadata"]["namespace"], item["metadata"]["name"])
            if key not in woken:
                self._wake(key, random.random() * self._period * _SPREAD)

    def _list(self, kind: str, namespace: str | None) -> tuple[list[Manifest], str]:
        """Return all objects of a kind with our label, in pages, and the version."""
        selector = "" if kind == SERVICE else LABEL_SERVICE
        items: list[Manifest] = []
        token = ""
        while True:
            try:
                page = self._cluster.page(
                    kind, namespace, selector=selector, limit=PAGE, token=token
                )
            except ClusterError as error:
                if error.status != _EXPIRED or not token:
                    raise
                items, token = [], ""  # the version of the pages has expired
                continue
            items += page["items"]
            token = page["metadata"].get("continue") or ""
            if not token:
                return items, page["metadata"]["resourceVersion"]
