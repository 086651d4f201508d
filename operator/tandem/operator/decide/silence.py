"""Routers that count as gone although their pods are ready: those of a node that fell silent.

A node that loses its power reports nothing. Its pods stay ready, and the Service sends clients to
them, until Kubernetes has waited long enough for the node: 40 s and more. A missing answer of an
address is known sooner. The kubelet judges the content of a router's answers.

Pure: ``probes.reach`` sends the requests, has the clock and takes the pods out. So a live router
may be held to be gone if the operator's own network is at fault. Therefore nothing is deleted: its
kubelet corrects a wrong status within some 10 s, and then counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from tandem.operator.decide.observe import PodView
from tandem.operator.desired.naming import Role

TRIES = 4
"""Failed requests to an address, one after the other, before it counts as silent."""
PROBATION = 15.0
"""Seconds in which no second node is judged: a live kubelet has corrected the status by then."""


@dataclass(slots=True)
class _Quiet:
    since: float
    """Time of its first failed request."""
    tries: int = 0


class Silence:
    """Silence of one service's routers. Times are those of one monotonic clock."""

    def __init__(self, patience: float) -> None:
        """Start without routers. ``patience``: seconds of silence until a router counts as gone."""
        self._patience = patience
        self._routers: tuple[PodView, ...] = ()
        self._answered: Set[str] = frozenset()
        self._quiet: dict[str, _Quiet] = {}
        self._taken: set[str] = set()
        self._objected: set[str] = set()
        """Routers that were taken out and are reported ready again, without their own answer."""
        self._last: tuple[str | None, float] = (None, float("-inf"))
        """The node that was judged last, and the time."""

    def see(self, pods: Iterable[PodView]) -> None:
        """Take the service's pods as the API server has them now."""
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
        """Return the routers whose addresses are to be checked: none if all are on one node."""
        return self._routers if len({pod.node for pod in self._routers}) > 1 else ()

    def heard(self, began: float, asked: Set[str], answered: Set[str]) -> None:
        """Record a round of requests, sent at ``began`` to routers by their UIDs, and the answers.

        A round in which no router of another node answers proves nothing of a router: then the
        operator itself may be cut off.
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
        """Return the routers to take out now: of one node, and never the last that answer."""
        judged, when = self._last
        on_their_way = self._taken - self._objected  # no look has told of them yet
        left = [pod for pod in self._routers if pod.uid not in on_their_way]
        for node in sorted({str(pod.node) for pod in left}):
            there = [pod for pod in left if pod.node == node]
            if node != judged and now - when < PROBATION:
                continue
            if self._others_answer(node) and all(self._is_silent(pod, now) for pod in there):
                return there
        return []

    def taken_out(self, pod: PodView, now: float) -> None:
        """Record that a pod was reported as not ready; a later report of ready overrides it."""
        self._taken.add(pod.uid)
        self._last = (pod.node, now)

    def _others_answer(self, node: str | None) -> bool:
        return any(pod.uid in self._answered and pod.node != node for pod in self._routers)

    def _is_silent(self, pod: PodView, now: float) -> bool:
        quiet = self._quiet.get(pod.uid)
        if quiet is None or pod.uid in self._objected:
            return False
        return quiet.tries >= TRIES and now - quiet.since >= self._patience
