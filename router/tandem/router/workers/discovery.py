"""Workers by the pods of a cluster: a list, a watch, and a new list every minute.

Requires get, list and watch on pods of a namespace. The blocking client runs in its own thread.
Known workers stay while the API server cannot be reached.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from tandem.link.session import LinkState
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import (
    ANNOTATION_ADMITTED,
    ANNOTATION_DRAINING,
    ENV_POD_NAMESPACE,
    LABEL_REVISION,
    LABEL_ROLE,
    WORKER_PORT,
)
from tandem.router.workers.connection import WorkerNote
from tandem.router.workers.pool import WorkerPool

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def own_namespace(selector: str) -> str:
    """Return the namespace of the pod of this process. Raise InvalidParameter outside a pod."""
    if namespace := os.environ.get(ENV_POD_NAMESPACE):
        return namespace
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        allowed = f"none outside a pod: neither {ENV_POD_NAMESPACE} nor {_NAMESPACE_FILE} is there"
        raise InvalidParameter("discovery_selector", selector, allowed) from None


LOOK_AGAIN = 15.0
"""Interval of reconnecting links that are down, in seconds."""


async def look_again(pool: WorkerPool, interval: float) -> None:
    """Reconnect addresses that were down for a whole ``interval``, until cancelled.

    An immediate reconnect would let two addresses of one worker end each other's links.
    """
    down: set[str] = set()
    while True:
        await asyncio.sleep(interval)
        still = {each for each, state in pool.links().items() if state is LinkState.DOWN}
        for endpoint in still & down:
            pool.reconnect(endpoint)
        down = still


Pod = Mapping[str, Any]
"""A Pod as JSON of the API server."""
_ENDED = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Facts of a pod for discovery."""

    uid: str
    created: str
    endpoint: str | None
    """``host:port`` of its worker; None without an address or after its end."""
    note: WorkerNote
    leave_ms: int | None = None
    """Milliseconds until a deleted pod is killed."""


def facts_of(pod: Pod, now: datetime | None = None) -> PodFacts:
    """Return the facts of a pod.

    The rest of a deleted pod's time is at most its grace period, even if the clock is wrong.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    annotations = metadata.get("annotations") or {}
    address: str | None = status.get("podIP")
    ended = status.get("phase") in _ENDED
    leave_ms = _leave_ms(metadata, now or datetime.now(UTC))
    note = WorkerNote(
        pod=metadata["name"],
        role=labels.get(LABEL_ROLE, ""),
        revision=labels.get(LABEL_REVISION, ""),
        admitted=annotations.get(ANNOTATION_ADMITTED) == "true",
        leaving=leave_ms is not None or annotations.get(ANNOTATION_DRAINING) == "true",
    )
    return PodFacts(
        uid=metadata["uid"],
        created=metadata.get("creationTimestamp") or "",
        endpoint=None if ended or not address else _endpoint(address),
        note=note,
        leave_ms=leave_ms,
    )


def _endpoint(address: str) -> str:
    return f"[{address}]:{WORKER_PORT}" if ":" in address else f"{address}:{WORKER_PORT}"


def _leave_ms(metadata: Mapping[str, Any], now: datetime) -> int | None:
    ends = metadata.get("deletionTimestamp")
    if ends is None:
        return None
    grace = int(metadata.get("deletionGracePeriodSeconds") or 0)
    left = (datetime.fromisoformat(ends) - now).total_seconds()
    return round(1000 * min(max(left, 0.0), grace))


class PodBook:
    """Pods of one selector, by UID."""

    def __init__(self) -> None:
        self._pods: dict[str, PodFacts] = {}

    def replace(self, pods: Iterable[Pod]) -> None:
        """Replace all pods by a full list."""
        self._pods = {facts.uid: facts for facts in map(facts_of, pods)}

    def apply(self, kind: str, pod: Pod) -> None:
        """Apply an event of a watch: ADDED, MODIFIED or DELETED."""
        if kind == "DELETED":
            self._pods.pop(pod["metadata"]["uid"], None)
        elif kind in ("ADDED", "MODIFIED"):
            facts = facts_of(pod)
            self._pods[facts.uid] = facts

    def by_endpoint(self) -> dict[str, PodFacts]:
        """Return the pod at each address, the younger of two."""
        found: dict[str, PodFacts] = {}
        for facts in sorted(self._pods.values(), key=lambda each: (each.created, each.uid)):
            if facts.endpoint is not None:
                found[facts.endpoint] = facts
        return found


class StaticDiscovery:
    """Listed addresses; ``run`` until cancelled."""

    def __init__(self, pool: WorkerPool, endpoints: Sequence[str]) -> None:
        self._pool = pool
        self._endpoints = tuple(dict.fromkeys(endpoints))

    async def run(self, interval: float = LOOK_AGAIN) -> None:
        """Add all addresses, then reconnect those that are down."""
        for endpoint in self._endpoints:
            self._pool.add(endpoint)
        await look_again(self._pool, interval)


logger = logging.getLogger(__name__)

RELIST = 60.0
"""Interval of full lists in seconds, to repair lost events."""
CONNECT_TIMEOUT = 4.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
_GONE = 410

Found = dict[str, PodFacts]


class ErrorCounter(Protocol):
    """Counter of errors between router and API server."""

    def discovery_failed(self) -> None: ...


class PodWatcher:
    """Reader of pods, in its own thread. Calls ``on_change`` with all pods after each change."""

    def __init__(
        self,
        api: Any,
        *,
        namespace: str,
        selector: str,
        on_change: Callable[[Found], None],
        counter: ErrorCounter,
        relist: float = RELIST,
    ) -> None:
        """``api`` is a ``kubernetes.client.CoreV1Api``."""
        self._api = api
        self._where = {"namespace": namespace, "label_selector": selector}
        self._on_change = on_change
        self._counter = counter
        self._relist = relist
        self._book = PodBook()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pod-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Request the end; a current read ends at its deadline."""
        self._stopping.set()

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            try:
                self._follow(self._list())
                pause = FIRST_PAUSE
            except Exception as error:  # any error: known workers stay
                if getattr(error, "status", None) == _GONE:
                    continue
                self._counter.discovery_failed()
                logger.warning("pods cannot be read, again in %.0f s: %s", pause, _short(error))
                self._stopping.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _list(self) -> str:
        """List all pods; return the version to watch from."""
        answer = self._api.list_namespaced_pod(
            **self._where, _request_timeout=(CONNECT_TIMEOUT, self._relist)
        )
        plain = self._api.api_client.sanitize_for_serialization
        self._book.replace(plain(item) for item in answer.items)
        self._notify()
        version: str = answer.metadata.resource_version
        return version

    def _follow(self, version: str) -> None:
        """Apply events from ``version`` on, until the next list is due."""
        from kubernetes.watch import Watch

        ends = time.monotonic() + self._relist
        seconds = max(1, round(self._relist))
        watch: Any = Watch()  # type: ignore[no-untyped-call]
        for event in watch.stream(
            self._api.list_namespaced_pod,
            **self._where,
            resource_version=version,
            timeout_seconds=seconds,
            _request_timeout=(CONNECT_TIMEOUT, self._relist + CONNECT_TIMEOUT),
        ):
            if self._stopping.is_set():
                return
            self._book.apply(event["type"], event["raw_object"])
            self._notify()
            if time.monotonic() >= ends:
                return

    def _notify(self) -> None:
        self._on_change(self._book.by_endpoint())


def _short(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return f"{type(error).__name__}: {reason or error}"[:300]


class KubernetesDiscovery:
    """Addresses from the cluster; ``run`` until cancelled."""

    def __init__(
        self, pool: WorkerPool, *, namespace: str, selector: str, counter: ErrorCounter
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._selector = selector
        self._counter = counter
        self._known: Found = {}

    async def run(self, interval: float = LOOK_AGAIN) -> None:
        """Keep the pool's addresses equal to the cluster's, and reconnect those that are down."""
        loop = asyncio.get_running_loop()
        latest: asyncio.Queue[Found] = asyncio.Queue()

        def on_change(found: Found) -> None:
            loop.call_soon_threadsafe(latest.put_nowait, found)

        watcher = PodWatcher(
            await asyncio.to_thread(_core_api),
            namespace=self._namespace,
            selector=self._selector,
            on_change=on_change,
            counter=self._counter,
        )
        watcher.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(look_again(self._pool, interval), name="look-again")
                while True:
                    self.apply(await latest.get())
        finally:
            watcher.stop()

    def apply(self, found: Found) -> None:
        """Add, remove and note addresses; a leaving pod gets its remaining time."""
        for endpoint in self._pool.links():
            before, facts = self._known.get(endpoint), found.get(endpoint)
            if facts is None or (before is not None and before.uid != facts.uid):
                self._pool.remove(endpoint)
        for endpoint, facts in found.items():
            known = self._known.get(endpoint)
            self._pool.add(endpoint)
            self._pool.note(endpoint, facts.note)
            leaves = facts.leave_ms is not None
            if leaves and (known is None or known.uid != facts.uid or known.leave_ms is None):
                self._pool.drain(endpoint, facts.leave_ms or 0)
        self._known = found


def _core_api() -> Any:
    """Return a client with a kubeconfig, or with the pod's service account."""
    from kubernetes import client, config

    config.load_config()  # type: ignore[no-untyped-call]
    return client.CoreV1Api()
