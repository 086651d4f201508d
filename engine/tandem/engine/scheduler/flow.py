"""Progress of steps: planned, updated, and the fence of the last result.

Blocks are cached when the step that writes them is planned, so a reader of cached blocks outside of
steps waits for that step. Written by the engine's thread, read by any.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.step import FenceDone
from tandem.protocol.kv import Fence


@dataclass(slots=True)
class Flow:
    """Numbers of steps; they run in order, so that a fence also covers all steps before it."""

    planned: int = 0
    """The last step that was planned."""
    updated: int = 0
    """The last step whose result was applied."""
    fence: Fence = field(default_factory=FenceDone)
    """Fence of the writes of step ``updated``."""

    def came_through(self, step: int, fence: Fence) -> None:
        """Apply a result. The fence is set first: a reader of the number has that fence or a later
        one."""
        self.fence = fence
        self.updated = step

    def behind_planned(self) -> Fence:
        """Return a fence that is done when all steps planned so far have written their blocks."""
        return _Behind(self, self.planned)


@dataclass(frozen=True, slots=True)
class _Behind:
    flow: Flow
    step: int

    def done(self) -> bool:
        """See Fence."""
        return self.flow.updated >= self.step and self.flow.fence.done()
