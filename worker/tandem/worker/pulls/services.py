"""A worker that hands over and takes over: two services behind the interface of one."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth
from tandem.worker.handoff import HandoffService


class BothWays:
    """``gives`` to peers and ``takes`` from them. Implements HandoffService; see there."""

    def __init__(self, gives: HandoffService, takes: HandoffService) -> None:
        self._gives = gives
        self._takes = takes

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Set the peers of the consumer, which connects to producers."""
        self._takes.set_peers(controls)

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Return the health of the consumer's links."""
        return self._takes.peer_health()

    def progress(self) -> int:
        """Return the sum of both counters."""
        return self._gives.progress() + self._takes.progress()

    def expected(self) -> float:
        """Return the consumer's expected time: KV comes to the consumer."""
        return self._takes.expected()

    def leased_blocks(self) -> int:
        """Return the number of blocks that the producer leases."""
        return self._gives.leased_blocks()

    def problem(self) -> str | None:
        """Return the problem of either service, or None."""
        return self._gives.problem() or self._takes.problem()

    def ended(self) -> str | None:
        """Return why either service has ended, or None."""
        return self._gives.ended() or self._takes.ended()

    def keeps_awake(self) -> str | None:
        """Return why either service keeps the worker awake, or None."""
        return self._gives.keeps_awake() or self._takes.keeps_awake()

    def sleep(self) -> int:
        """Put both services to sleep; return the bytes that they gave back."""
        return self._gives.sleep() + self._takes.sleep()

    def wake_up(self) -> None:
        """Wake both services up."""
        self._gives.wake_up()
        self._takes.wake_up()

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """Record the progress in both services."""
        self._gives.note_progress(engine_step, has_work)
        self._takes.note_progress(engine_step, has_work)

    def close(self) -> None:
        """Close both services, the producer first: peers are notified."""
        self._gives.close()
        self._takes.close()
