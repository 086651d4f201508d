"""What the worker's shell asks of a prefill worker's hand-off."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth


class PrefillRole:
    """``Role`` over a HandoffProducer: peers come to it, it calls on nobody."""

    returns_queue = True

    def __init__(self, producer: HandoffProducer) -> None:
        self._producer = producer

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Decode workers connect by themselves."""

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Links are judged by the decode workers."""
        return ()

    def transfer_progress(self) -> int:
        """Grows while parts are packed and taken."""
        return self._producer.progress()

    def leased_blocks(self) -> int:
        """Blocks promised to decode workers."""
        return self._producer.leased_blocks()

    def problem(self) -> str | None:
        """Why the hand-off cannot work, or None."""
        return self._producer.problem()

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """For the beats to decode workers."""
        self._producer.note_progress(engine_step, has_work)

    def close(self) -> None:
        """End its threads."""
        self._producer.close()
