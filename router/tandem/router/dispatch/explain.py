"""The last placements with all their numbers, and how well forecasts came true.

``/debug/placements`` shows them; metrics hold the error of every way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.router.metrics import RouterMetrics
from tandem.router.placement.base import Placement
from tandem.router.placement.forecast import Forecast
from tandem.router.placement.pulls import PullPlan
from tandem.router.tenant import Tenant

if TYPE_CHECKING:
    from tandem.router.dispatch.attempt import Attempt, Leg
    from tandem.router.dispatch.fleet import Fleet

KEPT = 256


@dataclass(slots=True)
class Explained:
    """One attempt: where it went, what that was to come to, and what it came to."""

    request: str
    attempt: int
    num_prompt: int
    placement: Placement
    tenant: str = ""
    ttft: float | None = None
    second: float | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it, in seconds."""
        placement = self.placement
        return {
            "request": self.request,
            "attempt": self.attempt,
            "prompt_tokens": self.num_prompt,
            "rule": placement.rule,
            "ttft_s": self.ttft,
            "second_s": self.second,
            "ways": [
                _way(each, chosen=each is placement.forecast) for each in placement.considered
            ],
        }


class Explanations:
    """The latest ``KEPT`` attempts. Called in the loop's thread."""

    def __init__(self) -> None:
        self._latest: deque[Explained] = deque(maxlen=KEPT)

    def sent(self, request: str, num_prompt: int, attempt: Attempt, *, tenant: str = "") -> None:
        """An attempt begins."""
        explained = Explained(request, attempt.number, num_prompt, attempt.placement, tenant)
        attempt.explained = explained
        self._latest.append(explained)

    def spoke(self, attempt: Attempt, leg: Leg, metrics: RouterMetrics, fleet: Fleet) -> None:
        """A leg says its first words: was it foreseen?"""
        explained, pair = attempt.explained, attempt.placement.pair
        if explained is None:
            return
        came = attempt.heard_at if leg.came_at is None else leg.came_at
        if explained.ttft is None:
            explained.ttft = seconds = came - attempt.started_at
            forecast = explained.placement.forecast
            if forecast is not None:
                metrics.forecast(forecast.way, abs(seconds - forecast.ttft))
        elif pair is not None and not leg.is_prefill:
            times = [each.came_at for each in attempt.legs if each.came_at is not None]
            explained.second = came - min(times, default=came)
            fleet.note_tail(pair, explained.second, came)

    def to_json(self, reader: Tenant) -> list[dict[str, Any]]:
        """Return those that ``reader`` may see, the latest first."""
        return [each.to_json() for each in reversed(self._latest) if reader.may_read(each.tenant)]


def _way(forecast: Forecast, *, chosen: bool) -> dict[str, Any]:
    return {
        "way": forecast.way,
        "worker": forecast.worker.hex(),
        "prefill": None if forecast.prefill is None else forecast.prefill.hex(),
        "ttft_s": forecast.ttft,
        "second_s": forecast.second,
        "hold_s": forecast.hold,
        "answers_s": forecast.answers,
        "missing": forecast.damage,
        "cost_s": forecast.cost,
        "chosen": chosen,
        "pull": None if forecast.pull is None else _pull(forecast.pull),
    }


def _pull(plan: PullPlan) -> dict[str, Any]:
    return {
        "holder": plan.holder.hex(),
        "prefix_tokens": plan.num_tokens,
        "tokens": plan.tokens,
        "pull_s": plan.seconds,
        "compute_s": plan.compute_s,
        "budget_s": plan.budget_s,
    }
