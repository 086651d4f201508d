"""A worker that hands over and takes over, as its shell sees it: two services behind one face."""

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
        """Who takes calls who gives."""
        self._takes.set_peers(controls)

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Links are judged by who takes."""
        return self._takes.peer_health()

    def progress(self) -> int:
        """Of both."""
        return self._gives.progress() + self._takes.progress()

    def expected(self) -> float:
        """KV comes to who takes."""
        return self._takes.expected()

    def leased_blocks(self) -> int:
        """What is promised, and so by who gives."""
        return self._gives.leased_blocks()

    def problem(self) -> str | None:
        """Of either."""
        return self._gives.problem() or self._takes.problem()

    def ended(self) -> str | None:
        """Of either."""
        return self._gives.ended() or self._takes.ended()

    def keeps_awake(self) -> str | None:
        """Of either."""
        return self._gives.keeps_awake() or self._takes.keeps_awake()

    def sleep(self) -> int:
        """Both."""
        return self._gives.sleep() + self._takes.sleep()

    def wake_up(self) -> None:
        """Both."""
        self._gives.wake_up()
        self._takes.wake_up()

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """To both."""
        self._gives.note_progress(engine_step, has_work)
        self._takes.note_progress(engine_step, has_work)

    def close(self) -> None:
        """Both, who gives first: peers are told."""
        self._gives.close()
        self._takes.close()
