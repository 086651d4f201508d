"""``/debug/fleet``: workers, links, waiting requests and rates; ``/debug/fabric``: links."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import LoadReport, PeerHealth
from tandem.router.dispatch.admission import AdmissionQueue
from tandem.router.dispatch.attempt import LegState
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.fleet import Fleet, LinkCount
from tandem.router.dispatch.job import Job
from tandem.router.metrics import RouterMetrics, only
from tandem.router.observe.gauges import RouterRates
from tandem.router.placement.rates import Pair
from tandem.router.workers.connection import Worker
from tandem.router.workers.pool import handoff_peers

PHASES = ("admission", "no_worker", "sent", "prefill", "handoff", "decode", "client")


@dataclass(slots=True)
class Underway:
    """Requests by phase, and by hand-off link."""

    phases: Counter[str] = field(default_factory=Counter)
    handoffs: Counter[Pair] = field(default_factory=Counter)

    @classmethod
    def of(cls, jobs: Collection[Job]) -> Underway:
        found = cls()
        for job in jobs:
            found.phases[phase_of(job)] += 1
            attempt = job.attempt
            pair = None if attempt is None else attempt.placement.pair
            if attempt is not None and pair is not None and not attempt.decoding:
                found.handoffs[pair] += 1
        return found

    def to_json(self) -> dict[str, int]:
        return {phase: self.phases[phase] for phase in PHASES}


def phase_of(job: Job) -> str:
    """Return the phase of a request, by what it waits for.

    admission   its turn in the router's queue
    no_worker   a worker that could take it
    sent        a worker's acceptance
    prefill     its first token
    handoff     the first output of the decode worker
    decode      its end
    client      the client, which has yet to read the end
    """
    attempt = job.attempt
    if attempt is None:
        return "no_worker" if job.admitted else "admission"
    if not job.admitted:
        return "client"
    if attempt.decoding:
        return "decode"
    if any(leg.has_output for leg in attempt.legs):
        return "handoff"
    if all(leg.state is LegState.SENT for leg in attempt.legs):
        return "sent"
    return "prefill"


MAX_LINKS = 4096
"""Maximum hand-off links that are listed."""
_NOTHING = LinkCount()


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """Maker of the view; used in the loop's thread."""

    fleet: Fleet
    dispatcher: Dispatcher
    admission: AdmissionQueue
    metrics: RouterMetrics
    rates: RouterRates

    def to_json(self) -> dict[str, Any]:
        now = time.monotonic()
        fleet, pool = self.fleet, self.fleet.pool
        underway = Underway.of(self.dispatcher.jobs)
        return {
            "router": pool.me.hex(),
            "links": dict(pool.links().items()),
            "workers": [self._worker(each, now) for each in pool.workers.values()],
            "keys": [] if pool.curve is None else pool.curve.names(),
            "refused": pool.refused(),
            "other_wires": pool.other_wires(),
            "indexed_blocks": len(fleet.index),
            **self._fabric(underway, now),
            "underway": underway.to_json(),
            "queue": self._queue(),
            "rates": self.rates.to_json(),
        }

    def fabric(self) -> dict[str, Any]:
        """Return the part about links, for ``/debug/fabric``."""
        return self._fabric(Underway.of(self.dispatcher.jobs), time.monotonic())

    def _fabric(self, underway: Underway, now: float) -> dict[str, Any]:
        fleet, pool = self.fleet, self.fleet.pool
        quarantined = fleet.quarantined()
        pairs = [
            (worker, health)
            for worker in pool.workers.values()
            for health in handoff_peers(worker, pool.workers).values()
        ]
        return {
            "transport": _transport(fleet),
            "quarantined": [
                {"prefill": p.hex(), "decode": d.hex(), "cause": cause}
                for (p, d), cause in quarantined.items()
            ],
            "pull_links": [self._pull_link(*pair) for pair in sorted(fleet.pull_links())],
            "handoff_links": [
                self._link(worker, health, underway, quarantined, now)
                for worker, health in islice(pairs, MAX_LINKS)
            ],
            "handoff_links_left_out": max(0, len(pairs) - MAX_LINKS),
        }

    def _pull_link(self, holder: Incarnation, puller: Incarnation) -> dict[str, Any]:
        health = self.fleet.pool.workers[puller].peers[holder]
        return {
            "holder": holder.hex(),
            "puller": puller.hex(),
            "bytes_per_s": round(health.bytes_per_s or health.probed_bytes_per_s),
        }

    def _queue(self) -> dict[str, Any]:
        admission, limits = self.admission, self.admission.limits
        return {
            "running": admission.num_running,
            "running_tokens": admission.running_tokens,
            "max_running": limits.max_inflight_requests,
            "max_running_tokens": limits.max_inflight_tokens,
            "waiting": admission.num_waiting,
            "waiting_tokens": admission.waiting_tokens,
            "max_waiting": limits.max_queued_requests,
            "oldest_wait_s": round(admission.oldest_wait(time.monotonic()), 3),
            "rejected": self.metrics.rejections(),
        }

    def _worker(self, worker: Worker, now: float) -> dict[str, Any]:
        load: LoadReport | None = worker.load
        rates = worker.throughput.rates() or (None, None, None)
        steps, computed, generated = (None if each is None else round(each, 2) for each in rates)
        return {
            "name": worker.name,
            "role": str(worker.role),
            "endpoint": worker.connection.endpoint,
            "incarnation": worker.incarnation.hex(),
            "model": worker.card.model,
            "fingerprint": worker.fingerprint,
            "compatibility": worker.compatibility,
            "block_size": worker.card.block_size,
            "pod": worker.note.pod,
            "revision": worker.note.revision,
            "draining": not worker.takes_new,
            "health": self._health(worker, now),
            "heard_ms_ago": round(1000 * (now - worker.received_at))
            if worker.received_at
            else None,
            "running": 0 if load is None else load.num_running,
            "waiting": 0 if load is None else load.num_waiting,
            "max_running": worker.card.max_num_seqs,
            "kv_use": _kv_use(load),
            "steps_per_s": steps,
            "prompt_tokens_per_s": computed,
            "generated_tokens_per_s": generated,
            "legs": worker.num_legs,
            "load": None if load is None else msgspec.to_builtins(load),
            "peers": {
                peer.hex(): state.up
                for peer, state in handoff_peers(worker, self.fleet.pool.workers).items()
            },
        }

    def _health(self, worker: Worker, now: float) -> str:
        if not worker.takes_new:
            return "draining"
        if worker.sleeps:
            return "asleep"
        if self.fleet.health.suspect(worker.incarnation, now):
            return "suspect"
        return "up" if worker.load is not None else "no word yet"

    def _link(
        self,
        decode: Worker,
        health: PeerHealth,
        underway: Underway,
        quarantined: Mapping[Pair, FailCause],
        now: float,
    ) -> dict[str, Any]:
        pair: Pair = (health.peer, decode.incarnation)
        count = self.fleet.handoffs.get(pair, _NOTHING)
        state, reason = self.standing(pair, health, quarantined, now)
        producer = self.fleet.pool.workers.get(health.peer)
        return {
            "prefill": health.peer.hex(),
            "prefill_name": None if producer is None else producer.name,
            "decode": decode.incarnation.hex(),
            "decode_name": decode.name,
            "state": state,
            "reason": reason,
            "transport": health.transport or None,
            "gb_per_s": round(health.bytes_per_s / 1e9, 4),
            "probed_gb_per_s": round(health.probed_bytes_per_s / 1e9, 4),
            "waiting_bytes": health.waiting_bytes,
            "underway": underway.handoffs[pair],
            "handoffs": count.done,
            "failed": count.failed,
            "handoffs_per_s": round(count.rate.read(now), 3),
            "tokens_per_s": round(count.token_rate.read(now), 1),
        }

    def standing(
        self, pair: Pair, health: PeerHealth, quarantined: Mapping[Pair, FailCause], now: float
    ) -> tuple[str, str]:
        """Return a link's state, and a reason if it is not ``up`` or slow."""
        if (cause := quarantined.get(pair)) is not None:
            return "quarantined", str(cause)
        if not health.up:
            return "down", health.reason
        if pair[0] not in self.fleet.pool.workers:
            return "down", "the router does not see its prefill worker"
        if self.fleet.links.rests(pair, now):
            return "resting", "timeouts"
        return "up", health.reason


def _kv_use(load: LoadReport | None) -> float | None:
    if load is None or not load.total_blocks:
        return None
    return round(1 - load.free_blocks / load.total_blocks, 4)


def _transport(fleet: Fleet) -> str | None:
    known = fleet.pool.workers
    links = (state for each in known.values() for state in handoff_peers(each, known).values())
    return ", ".join(sorted({each.transport for each in links if each.up} - {""})) or None


MAX_SERIES = 256

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
    """Register the series of links."""

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
        "Rate of KV over a link while some waited.",
        ends,
        read(lambda health: health.bytes_per_s),
    )
    gauge(
        "tandem:router_handoff_link_waiting_bytes",
        "KV that was announced over a link and has not arrived.",
        ends,
        read(lambda health: health.waiting_bytes),
    )
    gauge(
        "tandem:router_handoff_links_not_shown",
        f"Links without their own series, beyond the first {MAX_SERIES}.",
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
    """Return the pod, or the address without one."""
    return worker.note.pod or worker.connection.endpoint
