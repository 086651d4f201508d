"""How far steps have come: planned, through, and the fence behind what is through.

Blocks are cached when the step that writes them is planned, so whoever reads cached blocks outside
of steps waits for that step. Written by the engine's thread, read by any.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.step import FenceDone
from tandem.protocol.kv import Fence


@dataclass(slots=True)
class Flow:
    """Numbers of steps; they run in order, so that a fence is behind all before it, too."""

    planned: int = 0
    """The last step that was planned."""
    updated: int = 0
    """The last one whose result was taken in ..."""
    fence: Fence = field(default_factory=FenceDone)
    """... and the end of what it writes."""

    def came_through(self, step: int, fence: Fence) -> None:
        """A result was taken in. The fence first: who sees the number has that fence or a later."""
        self.fence = fence
        self.updated = step

    def behind_planned(self) -> Fence:
        """Done when all steps planned so far have written what they write."""
        return _Behind(self, self.planned)


@dataclass(frozen=True, slots=True)
class _Behind:
    flow: Flow
    step: int

    def done(self) -> bool:
        """See Fence."""
        return self.flow.updated >= self.step and self.flow.fence.done()
