"""Why a request went where it went, in numbers that a person can check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker in one part, with what it would cost."""

    name: str
    part: str
    """prefill, decode or whole."""
    hit_tokens: int
    """Cached tokens of the prompt."""
    pending_tokens: int
    num_requests: int
    cost: float
    """In prompt tokens; the least wins."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decision and who was considered."""

    rule: str
    """Why this shape: hand-off, or which reason kept the request whole."""
    candidates: tuple[Candidate, ...]

    def lines(self) -> list[str]:
        """One line for the rule and one per candidate, cheapest first."""
        ranked = sorted(self.candidates, key=lambda each: (each.part, each.cost))
        return [self.rule] + [
            f"{each.part} {each.name}: cost {each.cost:.0f} = "
            f"{each.hit_tokens} tokens cached, {each.pending_tokens} pending, "
            f"{each.num_requests} requests"
            for each in ranked
        ]
