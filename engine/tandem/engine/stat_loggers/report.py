"""What an engine did over some seconds, and what lives in it at their end."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.scheduler.stats import SchedulerStats
from tandem.engine.stat_loggers.totals import Totals


@dataclass(frozen=True, slots=True)
class Report:
    """One stretch of an engine's time; the last one is of all of it."""

    seconds: float
    final: bool
    """Whether it is of the whole time, at the engine's end."""
    done: Totals
    """What happened in these seconds."""
    now: SchedulerStats
    """What lives there at their end."""

    @classmethod
    def of(
        cls, before: Totals, after: Totals, now: SchedulerStats, seconds: float, *, final: bool
    ) -> Report:
        """Between two states of the counters."""
        return cls(max(seconds, 1e-9), final, after.less(before), now)

    @property
    def is_idle(self) -> bool:
        """Nothing happened, and nothing lives there."""
        return self.done == Totals() and not self.num_running and not self.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return self.now.running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, for KV or for a grammar."""
        return self.now.waiting + self.now.deferred

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that somebody holds, 0 to 1."""
        return self.now.cache_usage

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens of requests that began, however their KV came."""
        return self.done.prompt_tokens / self.seconds

    @property
    def generated_tokens_per_s(self) -> float:
        """Tokens drawn."""
        return self.done.generated_tokens / self.seconds

    @property
    def hit_rate(self) -> float | None:
        """Share of the tokens looked for in the prefix cache that were there; None without any."""
        return self.done.hit_tokens / self.done.queried_tokens if self.done.queried_tokens else None

    @property
    def handed_over_per_s(self) -> float:
        """Requests whose KV another worker took."""
        return self.done.handed_over / self.seconds

    @property
    def brought_tokens_per_s(self) -> float:
        """Prompt tokens whose KV came from elsewhere."""
        return self.done.external_tokens / self.seconds
