"""Interface between the worker's shell and its hand-off, next to the engine's KVConnector.

The two services of kvtransfer implement it unchanged; ``NoHandoff`` is for a worker without one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth


class HandoffService(Protocol):
    """Hand-off as the shell calls it; only ``close`` blocks."""

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Set the prefill workers that a router reports (control endpoint to incarnation)."""
        ...

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Return the links to prefill workers as this worker sees them."""
        ...

    def progress(self) -> int:
        """Return a counter that grows while transfers progress."""
        ...

    def expected(self) -> float:
        """Return the time by ``time.monotonic`` at which KV under way probably arrives. It is inf
        if no KV is under way, or if nothing predicts the time."""
        ...

    def leased_blocks(self) -> int:
        """Return the number of blocks that are leased to peers."""
        ...

    def problem(self) -> str | None:
        """Return why the worker should not get requests, or None."""
        ...

    def ended(self) -> str | None:
        """Return why no hand-off can work in this process again, or None."""
        ...

    def keeps_awake(self) -> str | None:
        """Return why the KV memory cannot be given back, or None."""
        ...

    def sleep(self) -> int:
        """Give back the memory that only hand-offs require; return its bytes. The engine sleeps."""
        ...

    def wake_up(self) -> None:
        """Take requests again after ``sleep``."""
        ...

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """Record the step loop's progress for the beats to peers."""
        ...

    def close(self) -> None:
        """Close links to peers, threads and memory; bounded by a few seconds."""
        ...


class NoHandoff:
    """Hand-off service of a worker without hand-offs."""

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Ignore the peers."""

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Return no links."""
        return ()

    def progress(self) -> int:
        """Return a constant."""
        return 0

    def expected(self) -> float:
        """Return inf: no KV is under way."""
        return math.inf

    def leased_blocks(self) -> int:
        """Return 0: no block is leased."""
        return 0

    def problem(self) -> str | None:
        """Return None: there is no problem."""
        return None

    def ended(self) -> str | None:
        """Return None: there is no service that could end."""
        return None

    def keeps_awake(self) -> str | None:
        """Return None: no peer has the memory registered."""
        return None

    def sleep(self) -> int:
        """Return 0: there is no such memory."""
        return 0

    def wake_up(self) -> None:
        """Do nothing."""

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PeerSets:
    """Prefill workers as several routers report them. The last report of each router is kept; the
    result is the union of these reports."""

    def __init__(self) -> None:
        self._by_router: dict[Incarnation, Mapping[str, Incarnation]] = {}

    def add(
        self, router: Incarnation, controls: Mapping[str, Incarnation]
    ) -> dict[str, Incarnation]:
        """Replace the router's last set; return the union."""
        self._by_router[router] = controls
        union: dict[str, Incarnation] = {}
        for each in self._by_router.values():
            union.update(each)
        return union

    def forget(self, router: Incarnation) -> None:
        """Remove a router that is gone. Links are kept until the next report of a router: the same
        router, back after a lost frame, would require them again."""
        self._by_router.pop(router, None)
