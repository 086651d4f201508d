"""Rates of the router over the last seconds, from its counters."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tandem.router.metrics import RouterMetrics, Totals
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
