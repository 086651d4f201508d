"""Check that running pods have read new public keys, so that a rotation need not wait longer.

Pods without the keys get an annotation, which makes their kubelet sync.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from threading import Event, Lock

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.decide.observe import PodView
from tandem.operator.desired.naming import Role
from tandem.operator.desired.workload import RevisionKey
from tandem.operator.probes.fleet import read_fleet
from tandem.protocol.names import ANNOTATION_KEYS_WANTED, ROUTER_PORT

Key = tuple[str, str]
TIMEOUT = 2.0
_EVERY, _ROUND = 0.5, 10.0
_NUDGE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PodAccess:
    """Ports and token for requests to the pods of a service."""

    probe_port: int
    others: Mapping[RevisionKey, int]
    """Different probe ports of other revisions."""
    token: str
    """Token of the canary."""


@dataclass(slots=True)
class _State:
    read: dict[str, frozenset[str]] = field(default_factory=dict)
    """Keys of pods, by UID."""
    nudged: dict[str, float] = field(default_factory=dict)
    busy: bool = False


class KeyWatch:
    """Keys that pods have read; requests run in threads. Thread-safe."""

    def __init__(self, cluster: Cluster, wake: Callable[[Key], None], workers: int = 2) -> None:
        self._cluster = cluster
        self._wake = wake
        self._states: dict[Key, _State] = {}
        self._lock = Lock()
        self._stop = Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="keys")

    def all_read(
        self, key: Key, pods: Iterable[PodView], wanted: frozenset[str], access: PodAccess
    ) -> bool:
        """Return whether all pods are known to have ``wanted``; ask them if not."""
        with self._lock:
            state = self._states.setdefault(key, _State())
            lacking = [pod for pod in pods if not wanted <= state.read.get(pod.uid, frozenset())]
            if not lacking or state.busy:
                return not lacking
            state.busy = True
        try:
            self._pool.submit(self._ask_all, key, state, lacking, wanted, access)
        except RuntimeError:  # closed
            state.busy = False
        return False

    def _ask_all(
        self,
        key: Key,
        state: _State,
        pods: list[PodView],
        wanted: frozenset[str],
        access: PodAccess,
    ) -> None:
        """Ask the pods until they have all keys, or a round is over; then wake the service."""
        ends = time.monotonic() + _ROUND
        try:
            while pods and time.monotonic() < ends and not self._stop.wait(_EVERY):
                pods = [pod for pod in pods if not self._has(key, state, pod, wanted, access)]
        finally:
            state.busy = False
            self._wake(key)

    def _has(
        self, key: Key, state: _State, pod: PodView, wanted: frozenset[str], access: PodAccess
    ) -> bool:
        found = read_keys(pod, access)
        if found is None:
            return False
        with self._lock:
            state.read[pod.uid] = found
        if wanted <= found:
            return True
        now = time.monotonic()
        if now - state.nudged.get(pod.uid, -_NUDGE_SECONDS) >= _NUDGE_SECONDS:
            state.nudged[pod.uid] = now
            self._nudge(key[0], pod.name)
        return False

    def _nudge(self, namespace: str, pod: str) -> None:
        """Annotate the pod, so that the kubelet syncs it now."""
        body = {"metadata": {"annotations": {ANNOTATION_KEYS_WANTED: str(int(time.time()))}}}
        try:
            self._cluster.patch("Pod", namespace, pod, body)
        except ClusterError:
            return  # the kubelet syncs later

    def forget(self, key: Key) -> None:
        with self._lock:
            self._states.pop(key, None)

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


def read_keys(pod: PodView, access: PodAccess) -> frozenset[str] | None:
    """Return the keys (``role.generation``) that a pod reports; None without an answer."""
    if pod.ip is None:
        return None
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    try:
        if pod.role is Role.ROUTER:
            fleet = read_fleet(f"http://{host}:{ROUTER_PORT}", access.token, TIMEOUT)
        else:
            port = access.others.get((pod.role, pod.revision), access.probe_port)
            address = f"http://{host}:{port}/debug"
            with urllib.request.urlopen(address, timeout=TIMEOUT) as answer:
                fleet = json.load(answer)
        return frozenset(map(str, fleet["keys"]))
    except (OSError, ValueError, LookupError, TypeError, HTTPException):
        return None
