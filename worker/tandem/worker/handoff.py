"""Interface between worker and hand-off services."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth


class HandoffService(Protocol):
    """Hand-off service of a worker; only ``close`` blocks."""

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Set a router's prefill workers, as incarnations by control endpoint."""
        ...

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Return the states of the links to prefill workers."""
        ...

    def progress(self) -> int:
        """Return a counter that grows while transfers progress."""
        ...

    def expected(self) -> float:
        """Return the predicted arrival of KV under way, by ``time.monotonic``; inf without a
        prediction."""
        ...

    def leased_blocks(self) -> int:
        """Return the number of blocks leased to peers."""
        ...

    def problem(self) -> str | None:
        """Return why the worker should get no requests, or None."""
        ...

    def ended(self) -> str | None:
        """Return why no hand-off can work in this process again, or None."""
        ...

    def keeps_awake(self) -> str | None:
        """Return why the KV memory cannot be freed, or None."""
        ...

    def sleep(self) -> int:
        """Free the memory that only hand-offs require; return its bytes. The engine sleeps."""
        ...

    def wake_up(self) -> None:
        """Take requests again after ``sleep``."""
        ...

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """Record the step loop's progress for the beats to peers."""
        ...

    def close(self) -> None:
        """Close links to peers, threads and memory within a few seconds."""
        ...


class NoHandoff:
    """Hand-off service of a worker without hand-offs."""

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Do nothing."""

    def peer_health(self) -> tuple[PeerHealth, ...]:
        return ()

    def progress(self) -> int:
        return 0

    def expected(self) -> float:
        return math.inf

    def leased_blocks(self) -> int:
        return 0

    def problem(self) -> str | None:
        return None

    def ended(self) -> str | None:
        return None

    def keeps_awake(self) -> str | None:
        return None

    def sleep(self) -> int:
        return 0

    def wake_up(self) -> None:
        """Do nothing."""

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PeerSets:
    """Union of the prefill workers that routers reported last."""

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
        """Remove a router that is gone. Links are kept until the next report, as the router may
        return."""
        self._by_router.pop(router, None)
