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
    """False: no step ran and there is no output; wait for a message before the next call."""
    outputs: dict[bytes, list[EngineOutput]] = field(default_factory=dict)
    """Outputs by router incarnation."""
    failed: dict[bytes, list[Failed]] = field(default_factory=dict)
    blocks: BlockEvents | None = None
    """Changes of the prefix cache, for every router."""
    refused: dict[bytes, list[Refused]] = field(default_factory=dict)
    """Requests that were accepted and cannot be served, by router incarnation."""
    ended: Sequence[NoteBook] = ()
    """Notes of watched requests that ended."""

    def by_router(
        self,
    ) -> Iterator[tuple[Incarnation, tuple[EngineOutput, ...], tuple[Failed, ...]]]:
        """Yield all outputs and failures of each router that has any."""
        for router in {**self.outputs, **self.failed}:
            outputs, failed = self.outputs.get(router, ()), self.failed.get(router, ())
            yield Incarnation(router), tuple(outputs), tuple(failed)
