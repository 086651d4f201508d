"""What the worker's shell asks of a decode worker's hand-off."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth


class DecodeRole:
    """``Role`` over a HandoffConsumer."""

    returns_queue = False

    def __init__(self, consumer: HandoffConsumer) -> None:
        self._consumer = consumer

    def set_peers(self, controls: Mapping[str, Incarnation]) -> None:
        """Keep links to these prefill workers, so that no request pays the handshake."""
        self._consumer.set_peers(controls)

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Links as this worker sees them."""
        return self._consumer.peer_health()

    def transfer_progress(self) -> int:
        """Grows while parts are read and unpacked."""
        return self._consumer.progress()

    def leased_blocks(self) -> int:
        """A decode worker promises none."""
        return 0

    def problem(self) -> str | None:
        """Why the hand-off cannot work, or None."""
        return self._consumer.problem()

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """For the beats to prefill workers."""
        self._consumer.note_progress(engine_step, has_work)

    def close(self) -> None:
        """Fail what is under way and end its threads."""
        self._consumer.close()
