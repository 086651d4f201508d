"""Gauges of the router, read from their sources at each scrape."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tandem.router.dispatch.admission import AdmissionQueue
from tandem.router.dispatch.fleet import Fleet
from tandem.router.dispatch.placing import HitCeiling
from tandem.router.metrics import RouterMetrics, Totals, only
from tandem.router.workers.connection import Worker
from tandem.router.workers.pool import handoff_peers
from tandem.router.workers.rates import Naps, Window

SAMPLE_SECONDS = 1.0


class RouterRates:
    """Rates from samples of the counters, once a second."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._window = Window()

    async def run(self) -> None:
        naps = Naps(asyncio.get_running_loop(), SAMPLE_SECONDS)
        while True:
            self.sample(time.monotonic())
            await naps.sleep()

    def sample(self, now: float) -> None:
        self._window.note(now, *self._metrics.totals())

    def to_json(self) -> dict[str, Any]:
        """Return rates per second, and means over the window; None without events."""
        seconds, went = self._window.differences()
        if not went:
            return {"window_s": 0.0}
        over = Totals(*went)
        outputs = over.first_outputs + over.next_outputs
        return {
            "window_s": round(seconds, 3),
            "requests_per_s": round(over.started / seconds, 3),
            "ended_per_s": round(over.ended / seconds, 3),
            "failed_per_s": round(over.failed / seconds, 3),
            "prompt_tokens_per_s": round(over.prompt_tokens / seconds, 1),
            "outputs_per_s": round(outputs / seconds, 1),
            # Cached tokens are known later than their prompts.
            "cached_share": _mean(min(over.cached_tokens, over.prompt_tokens), over.prompt_tokens),
            "ttft_ms": _mean(1000 * over.first_output_seconds, over.first_outputs),
            "itl_ms": _mean(1000 * over.next_output_seconds, over.next_outputs),
        }


def _mean(total: float, count: float) -> float | None:
    return round(total / count, 4) if count else None


_Reading = Mapping[tuple[str, ...], float]


def register_gauges(
    metrics: RouterMetrics,
    fleet: Fleet,
    admission: AdmissionQueue,
    ceiling: HitCeiling,
    *,
    ready_decode: int,
) -> None:
    """Register all gauges; readiness requires ``ready_decode`` decode workers."""

    def workers() -> _Reading:
        return Counter((str(worker.role), _state(worker)) for worker in fleet.pool.workers.values())

    def links() -> _Reading:
        return Counter((str(state),) for state in fleet.pool.links().values())

    def handoff_links() -> _Reading:
        known = fleet.pool.workers
        up = sum(
            state.up for worker in known.values() for state in handoff_peers(worker, known).values()
        )
        return {("up",): up, ("quarantined",): len(fleet.quarantined())}

    def hit_ceiling() -> _Reading:
        share = ceiling.read()
        return {} if share is None else only(share)

    gauge = metrics.gauge
    gauge(
        "tandem:router_prefix_hit_ceiling",
        "Share of prompt blocks of the last 12 to 24 hours that an unlimited cache would have.",
        (),
        hit_ceiling,
    )
    gauge(
        "vllm:num_requests_running",
        "Requests dispatched and not finished.",
        (),
        lambda: only(admission.num_running),
    )
    gauge(
        "vllm:num_requests_waiting",
        "Requests in the router's queue.",
        (),
        lambda: only(admission.num_waiting),
    )
    gauge(
        "tandem:router_oldest_queued_seconds",
        "Wait of the oldest request in the router's queue.",
        (),
        lambda: only(admission.oldest_wait(time.monotonic())),
    )
    gauge("tandem:router_workers", "Workers by role and state.", ("role", "state"), workers)
    gauge(
        "tandem:router_needs_decode",
        "1 if requests require a decode worker, 0 if prefill workers answer them.",
        (),
        lambda: only(fleet.needs_decode(ready_decode)),
    )
    gauge("tandem:router_links", "Addresses of workers, by state of the link.", ("state",), links)
    gauge(
        "tandem:router_handoff_links",
        "Links between prefill and decode workers, as decode workers report.",
        ("state",),
        handoff_links,
    )
    gauge(
        "tandem:router_prefix_index_blocks",
        "Block hashes of all workers in the router's index.",
        (),
        lambda: only(len(fleet.index)),
    )


def _state(worker: Worker) -> str:
    if worker.draining:
        return "draining"
    return "asleep" if worker.sleeps else "up"
