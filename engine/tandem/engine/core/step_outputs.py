"""Outputs of a step of the engine, for routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.protocol.ids import Incarnation
from tandem.protocol.outputs import BlockEvents, EngineOutput, Failed, Refused
from tandem.protocol.timeline import NoteBook


@dataclass(slots=True)
class StepOutputs:
    """Outputs of one call of ``step``."""

    progressed: bool
    """False: nothing ran and nothing was said; wait for a message before the next call."""
    outputs: dict[bytes, list[EngineOutput]] = field(default_factory=dict)
    """By router incarnation."""
    failed: dict[bytes, list[Failed]] = field(default_factory=dict)
    blocks: BlockEvents | None = None
    """For every router."""
    refused: dict[bytes, list[Refused]] = field(default_factory=dict)
    """What was taken and cannot be, by router incarnation."""
    ended: Sequence[NoteBook] = ()
    """Notes of watched requests that ended."""

    def by_router(
        self,
    ) -> Iterator[tuple[Incarnation, tuple[EngineOutput, ...], tuple[Failed, ...]]]:
        """Yield all outputs and failures of each router that has any."""
        for router in {**self.outputs, **self.failed}:
            outputs, failed = self.outputs.get(router, ()), self.failed.get(router, ())
            yield Incarnation(router), tuple(outputs), tuple(failed)
