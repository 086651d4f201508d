"""What an engine has done since its start, in a few numbers that cost an addition a step."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tandem.engine.scheduler.stats import StepStats


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    prompt_tokens: int = 0
    """Prompt tokens of requests that began."""
    computed_tokens: int = 0
    """Prompt tokens computed here."""
    external_tokens: int = 0
    """Prompt tokens whose KV came from elsewhere."""
    queried_tokens: int = 0
    """Tokens looked for in the prefix cache."""
    hit_tokens: int = 0
    """Tokens found there."""
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    """Requests that ended here, handed over or not."""
    handed_over: int = 0
    """Of these, the ones that another worker goes on with."""

    def less(self, before: Totals) -> Totals:
        """What came to these since ``before``."""
        return Totals(
            *(getattr(self, each.name) - getattr(before, each.name) for each in fields(self))
        )

    def add(self, stats: StepStats) -> None:
        """What happened since the last call."""
        self.prompt_tokens += stats.prompt_tokens
        self.computed_tokens += stats.computed_tokens
        self.external_tokens += stats.external_tokens
        self.queried_tokens += stats.queried_tokens
        self.hit_tokens += stats.hit_tokens
        self.generated_tokens += stats.generated_tokens
        self.preemptions += stats.preemptions
        for record in stats.finished:
            self.finished += 1
            self.handed_over += record.reason == "handed_over"
