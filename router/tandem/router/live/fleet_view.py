"""``/debug/fleet``: workers, the links between them, waiting requests and rates; and
``/debug/fabric``: the links alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import LoadReport, PeerHealth
from tandem.router.admission.queue import AdmissionQueue
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.fleet import Fleet, LinkCount
from tandem.router.live.rates import RouterRates
from tandem.router.live.underway import Underway
from tandem.router.metrics import RouterMetrics
from tandem.router.placement.links import Pair
from tandem.router.workers.peering import handoff_peers
from tandem.router.workers.worker import Worker

MAX_LINKS = 4096
"""Hand-off links that are listed; further ones are only counted."""
_NOTHING = LinkCount()


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """Makes the view; used in the loop's thread."""

    fleet: Fleet
    dispatcher: Dispatcher
    admission: AdmissionQueue
    metrics: RouterMetrics
    rates: RouterRates

    def to_json(self) -> dict[str, Any]:
        """Return the current state of all of it."""
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
        """Return the part about links between workers: ``/debug/fabric``."""
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
        rates = worker.pace.rates() or (None, None, None)
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
            "heard_ms_ago": round(1000 * (now - worker.heard_at)) if worker.heard_at else None,
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
        """Return a link's state, and the reason if it is not ``up`` or slower than possible."""
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
    """Return the share of the blocks that are held."""
    if load is None or not load.total_blocks:
        return None
    return round(1 - load.free_blocks / load.total_blocks, 4)


def _transport(fleet: Fleet) -> str | None:
    """Return the transports of KV over the links that are up, joined by commas, or None."""
    known = fleet.pool.workers
    links = (state for each in known.values() for state in handoff_peers(each, known).values())
    return ", ".join(sorted({each.transport for each in links if each.up} - {""})) or None
