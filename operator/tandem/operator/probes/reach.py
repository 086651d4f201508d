"""Checks of routers' addresses; routers of a dead node are removed from Services.

Any answer of a node's kernel counts. A removed pod gets ``Ready=False``, as Kubernetes would set
later.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Set,
)
from contextlib import ExitStack
from dataclasses import dataclass

from tandem.operator.clock import time_text
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.events import warning
from tandem.operator.decide.observe import PodView
from tandem.operator.desired.naming import Identity, Manifest, Role
from tandem.operator.look import (
    Beside,
    Key,
    Trigger,
    unrecorded,
)
from tandem.operator.metrics import OperatorMetrics
from tandem.protocol.names import ROUTER_PORT

TRIES = 4
"""Consecutive failures before an address counts as silent."""
PROBATION = 15.0
"""Seconds in which no second node is judged."""


@dataclass(slots=True)
class _Quiet:
    since: float
    """Time of its first failed request."""
    tries: int = 0


class Silence:
    """Silence of one service's routers, in times of one monotonic clock."""

    def __init__(self, patience: float) -> None:
        """``patience``: seconds of silence until a router counts as gone."""
        self._patience = patience
        self._routers: tuple[PodView, ...] = ()
        self._answered: Set[str] = frozenset()
        self._quiet: dict[str, _Quiet] = {}
        self._taken: set[str] = set()
        self._objected: set[str] = set()
        """Removed routers that are reported ready without their own answer."""
        self._last: tuple[str | None, float] = (None, float("-inf"))
        """The last judged node, and the time."""

    def see(self, pods: Iterable[PodView]) -> None:
        """Set the current pods of the service."""
        pods = list(pods)
        self._routers = tuple(
            pod
            for pod in pods
            if pod.role is Role.ROUTER and pod.ready and not pod.deleting and pod.ip and pod.node
        )
        there = {pod.uid for pod in pods}
        ready = {pod.uid for pod in self._routers}
        self._taken &= there
        self._objected = (self._objected & there) | (self._taken & ready)
        self._quiet = {uid: quiet for uid, quiet in self._quiet.items() if uid in ready}

    def asked(self) -> tuple[PodView, ...]:
        """Return the routers to check: none if all are on one node."""
        return self._routers if len({pod.node for pod in self._routers}) > 1 else ()

    def record_round(self, began: float, asked: Set[str], answered: Set[str]) -> None:
        """Record a round of requests, sent at ``began``, and its answers.

        Without an answer from another node the operator itself may be cut off.
        """
        self._answered = answered
        for pod in self._routers:
            if pod.uid in answered:
                self._quiet.pop(pod.uid, None)
                self._taken.discard(pod.uid)
                self._objected.discard(pod.uid)
            elif pod.uid in asked and self._others_answer(pod.node):
                self._quiet.setdefault(pod.uid, _Quiet(began)).tries += 1

    def gone(self, now: float) -> list[PodView]:
        """Return the routers to remove: of one node, never the last that answer."""
        judged, when = self._last
        on_their_way = self._taken - self._objected  # not seen by a look yet
        left = [pod for pod in self._routers if pod.uid not in on_their_way]
        for node in sorted({str(pod.node) for pod in left}):
            there = [pod for pod in left if pod.node == node]
            if node != judged and now - when < PROBATION:
                continue
            if self._others_answer(node) and all(self._is_silent(pod, now) for pod in there):
                return there
        return []

    def taken_out(self, pod: PodView, now: float) -> None:
        """Record that a pod was reported as not ready."""
        self._taken.add(pod.uid)
        self._last = (pod.node, now)

    def _others_answer(self, node: str | None) -> bool:
        return any(pod.uid in self._answered and pod.node != node for pod in self._routers)

    def _is_silent(self, pod: PodView, now: float) -> bool:
        quiet = self._quiet.get(pod.uid)
        if quiet is None or pod.uid in self._objected:
            return False
        return quiet.tries >= TRIES and now - quiet.since >= self._patience


logger = logging.getLogger(__name__)

REASON = "AddressSilent"
AT_ONCE = 512
"""Maximum concurrent requests."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: the connection leaves no state."""
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class Reach:
    """Watches the routers that ``look`` names. Thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        wake: Callable[[Key], None],
        metrics: OperatorMetrics,
        patience: float,
        taking_out: Beside = unrecorded,
        port: int = ROUTER_PORT,
    ) -> None:
        """``patience``: seconds of silence until a router counts as gone; 0 checks none.

        ``taking_out``: context of a removal, given service and reason.
        """
        self._cluster = cluster
        self._wake = wake
        self._metrics = metrics
        self._patience = patience
        self._taking_out = taking_out
        self._port = port
        self._services: dict[Key, tuple[Identity, Silence]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reach", daemon=True)
        if patience > 0:
            self._thread.start()

    def look(self, owner: Identity, pods: Iterable[PodView]) -> None:
        """Set the current pods of a service."""
        key = (owner.namespace, owner.name)
        with self._lock:
            known = self._services.get(key)
            if known is None or known[0] != owner:
                known = self._services[key] = (owner, Silence(self._patience))
            known[1].see(pods)

    def forget(self, key: Key) -> None:
        with self._lock:
            self._services.pop(key, None)

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        every = self._patience / TRIES
        while not self._stop.is_set():
            began = time.monotonic()
            with self._lock:
                pods = [pod for _, known in self._services.values() for pod in known.asked()]
            addresses = {pod.uid: pod.ip or "" for pod in pods}
            try:
                answered = answering(addresses, self._port, every)
            except OSError as error:  # no socket: no evidence about routers
                logger.error("routers cannot be probed: %s", error)
            else:
                self._judge(began, addresses.keys(), answered)
            self._stop.wait(max(0.0, began + every - time.monotonic()))

    def _judge(self, began: float, asked: Set[str], answered: Set[str]) -> None:
        found: list[tuple[Identity, Silence, PodView]] = []
        with self._lock:
            for owner, silence in self._services.values():
                silence.record_round(began, asked, answered)
                gone = silence.gone(time.monotonic())
                found += [(owner, silence, pod) for pod in gone]
        for owner, silence, pod in found:
            key = (owner.namespace, owner.name)
            with self._taking_out(key, [Trigger.REACH]):
                taken = self._take_out(owner, pod)
            if taken:
                with self._lock:
                    silence.taken_out(pod, time.monotonic())
            self._wake(key)

    def _take_out(self, owner: Identity, pod: PodView) -> bool:
        """Set a pod to not ready; return whether the API server accepted it."""
        text = f"{pod.ip} on node {pod.node} has not answered for {self._patience:g} s"
        message = f"router {pod.name}: {text}, while a router on another node does"
        logger.warning("%s/%s: %s", owner.namespace, owner.name, message)
        try:
            self._cluster.patch_pod_status(owner.namespace, pod.name, _unready(pod, text))
        except ClusterError as error:
            logger.warning("%s/%s: not taken out: %s", owner.namespace, pod.name, error)
            return False
        self._metrics.silent_routers.inc()
        try:
            self._cluster.create(warning(owner, REASON, message, time.time()))
        except ClusterError as error:
            logger.warning("%s/%s: no event: %s", owner.namespace, owner.name, error)
        return True


def _unready(pod: PodView, text: str) -> Manifest:
    ready = {
        "type": "Ready",
        "status": "False",
        "reason": REASON,
        "message": text,
        "lastTransitionTime": time_text(time.time()),
    }
    return {"metadata": {"uid": pod.uid}, "status": {"conditions": [ready]}}


def answering(addresses: Mapping[str, str], port: int, seconds: float) -> frozenset[str]:
    """Return the keys of the addresses that answer in time. Raises OSError without a socket."""
    each = list(addresses.items())
    answered: set[str] = set()
    for start in range(0, len(each), AT_ONCE):
        answered |= _answering(dict(each[start : start + AT_ONCE]), port, seconds)
    return frozenset(answered)


def _answering(addresses: Mapping[str, str], port: int, seconds: float) -> set[str]:
    answered: set[str] = set()
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        waiting = 0
        for key, address in addresses.items():
            made = stack.enter_context(_made(address))
            code = made.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                selector.register(made, selectors.EVENT_WRITE, key)
                waiting += 1
            elif code in _ANSWERS:
                answered.add(key)
        end = time.monotonic() + seconds
        while waiting:
            left = end - time.monotonic()
            for found, _ in selector.select(max(0.0, left)):
                selector.unregister(found.fileobj)
                waiting -= 1
                if _error_of(found.fileobj) in _ANSWERS:
                    answered.add(found.data)
            if left <= 0:  # read once more: this process may have slept
                break
    return answered


def _made(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    return made


def _error_of(asked: object) -> int:
    assert isinstance(asked, socket.socket)
    return asked.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
