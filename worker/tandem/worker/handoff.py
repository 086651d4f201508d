"""What the shell of a worker asks of its hand-off, beside the KVConnector that the engine calls.

The two services of kvtransfer are it as they are; ``NoHandoff`` is a worker without one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth


class HandoffService(Protocol):
    """Called by the shell; none of these blocks but ``close``."""

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """A router says which prefill workers there are (control endpoint to incarnation)."""
        ...

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Links to prefill workers as this worker sees them."""
        ...

    def progress(self) -> int:
        """A counter that grows while transfers move."""
        ...

    def expected(self) -> float:
        """When KV that is on its way is likely to have come, by ``time.monotonic``; inf where none
        is, or nothing foretells it."""
        ...

    def leased_blocks(self) -> int:
        """Blocks promised to peers."""
        ...

    def problem(self) -> str | None:
        """Why the worker should not get requests, or None."""
        ...

    def ended(self) -> str | None:
        """Why no hand-off will ever work in this process again, or None."""
        ...

    def keeps_awake(self) -> str | None:
        """Why the KV memory cannot be given back, or None."""
        ...

    def sleep(self) -> int:
        """The engine sleeps: give back memory that only hand-offs need; how many bytes."""
        ...

    def wake_up(self) -> None:
        """It takes requests again."""
        ...

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """The step loop's progress, for the beats to peers."""
        ...

    def close(self) -> None:
        """Let go of peers, threads and memory; bounded by a few seconds."""
        ...


class NoHandoff:
    """A worker that hands nothing over."""

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Nobody to know."""

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """No links."""
        return ()

    def progress(self) -> int:
        """Nothing moves."""
        return 0

    def expected(self) -> float:
        """Nothing comes."""
        return math.inf

    def leased_blocks(self) -> int:
        """Nothing is promised."""
        return 0

    def problem(self) -> str | None:
        """Nothing that could be wrong."""
        return None

    def ended(self) -> str | None:
        """Nothing that could end."""
        return None

    def keeps_awake(self) -> str | None:
        """Nobody else knows the memory."""
        return None

    def sleep(self) -> int:
        """There is no such memory."""
        return 0

    def wake_up(self) -> None:
        """Nothing was given back."""

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to let go of."""


class PeerSets:
    """Which prefill workers there are, when several routers each say what they know: the last word
    of each; what counts is all of them together."""

    def __init__(self) -> None:
        self._by_router: dict[Incarnation, Mapping[str, Incarnation]] = {}

    def add(
        self, router: Incarnation, controls: Mapping[str, Incarnation]
    ) -> dict[str, Incarnation]:
        """A router's set replaces its last one; returns the union."""
        self._by_router[router] = controls
        union: dict[str, Incarnation] = {}
        for each in self._by_router.values():
            union.update(each)
        return union

    def forget(self, router: Incarnation) -> None:
        """A router is gone. Links are kept until another router speaks: the same router, back
        after a lost frame, would want them again."""
        self._by_router.pop(router, None)
