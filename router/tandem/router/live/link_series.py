"""The matrix of prefill and decode workers in ``/metrics``: each link's state, pace and queued KV.

Read from decode workers' beats at a scrape. Bounded: of more than ``MAX_SERIES`` links those that
are down come first, then those with the most to bring, then the number of omitted ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth
from tandem.router.live.fleet_view import LiveFleet
from tandem.router.metrics import RouterMetrics, only
from tandem.router.workers.peering import handoff_peers
from tandem.router.workers.worker import Worker

MAX_SERIES = 256
"""Links that have series of their own."""

Labels = tuple[str, ...]


class _Link(NamedTuple):
    prefill: str
    decode: str
    health: PeerHealth
    state: str

    @property
    def ends(self) -> Labels:
        return self.prefill, self.decode, self.health.transport


def register_link_series(metrics: RouterMetrics, live: LiveFleet) -> None:
    """Register all of them."""

    def read(what: Callable[[PeerHealth], float]) -> Callable[[], Mapping[Labels, float]]:
        return lambda: {each.ends: what(each.health) for each in _shown(live)[0]}

    gauge, ends = metrics.gauge, ("prefill", "decode", "transport")
    gauge(
        "tandem:router_handoff_link_info",
        "Links between prefill and decode workers by state: up, down, resting, quarantined.",
        (*ends, "state"),
        lambda: {(*each.ends, each.state): 1.0 for each in _shown(live)[0]},
    )
    gauge(
        "tandem:router_handoff_link_bytes_per_second",
        "KV that came over a link, over the seconds in which some waited.",
        ends,
        read(lambda health: health.bytes_per_s),
    )
    gauge(
        "tandem:router_handoff_link_waiting_bytes",
        "KV that is announced over a link and has not come.",
        ends,
        read(lambda health: health.waiting_bytes),
    )
    gauge(
        "tandem:router_handoff_links_not_shown",
        f"Links without series of their own: more than {MAX_SERIES} are too many.",
        (),
        lambda: only(_shown(live)[1]),
    )


def _shown(live: LiveFleet) -> tuple[list[_Link], int]:
    """Return the links with series, and the number of those without."""
    pool, now = live.fleet.pool, time.monotonic()
    quarantined = live.fleet.quarantined()
    found = []
    for worker in pool.workers.values():
        for health in handoff_peers(worker, pool.workers).values():
            state, _ = live.standing((health.peer, worker.incarnation), health, quarantined, now)
            found.append(_Link(_name(health.peer, pool.workers), _label(worker), health, state))
    if len(found) > MAX_SERIES:
        found.sort(key=lambda link: (link.state == "up", -link.health.waiting_bytes))
    return found[:MAX_SERIES], max(0, len(found) - MAX_SERIES)


def _name(peer: Incarnation, workers: Mapping[Incarnation, Worker]) -> str:
    worker = workers.get(peer)
    return peer.hex() if worker is None else _label(worker)


def _label(worker: Worker) -> str:
    """Return the pod, whose name outlives a restart; without one the address."""
    return worker.note.pod or worker.connection.endpoint
