"""What the shell of a worker asks of its role, beside the KVConnector that the engine calls.

prefill/ and decode/ implement it over their hand-off service; ``Standalone`` is a worker
without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth


class Role(Protocol):
    """Called by the shell; none of these blocks but ``close``."""

    @property
    def returns_queue(self) -> bool:
        """Whether a drain gives requests that wait back at once, since another can begin them."""
        ...

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """A router says which prefill workers there are (control endpoint to incarnation)."""
        ...

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Links to prefill workers as this worker sees them."""
        ...

    def transfer_progress(self) -> int:
        """A counter that grows while transfers move."""
        ...

    def leased_blocks(self) -> int:
        """Blocks promised to peers."""
        ...

    def problem(self) -> str | None:
        """Why the worker should not get requests, or None."""
        ...

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """The step loop's progress, for the beats to peers."""
        ...

    def close(self) -> None:
        """Let go of peers, threads and memory; bounded by a few seconds."""
        ...


class Standalone:
    """A worker that hands nothing over."""

    returns_queue = False

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Nobody to know."""

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """No links."""
        return ()

    def transfer_progress(self) -> int:
        """Nothing moves."""
        return 0

    def leased_blocks(self) -> int:
        """Nothing is promised."""
        return 0

    def problem(self) -> str | None:
        """Nothing that could be wrong."""
        return None

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to let go of."""
