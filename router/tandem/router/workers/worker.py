"""A worker that is up, as its links and discovery describe it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.protocol.card import ModelCard, WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import LoadReport, PeerHealth
from tandem.router.workers.connection import NO_NOTE, WorkerConnection, WorkerNote
from tandem.router.workers.rates import Window


@dataclass(slots=True, eq=False)
class Worker:
    """A worker that is up."""

    incarnation: Incarnation
    card: ModelCard
    connection: WorkerConnection
    role: WorkerRole
    fingerprint: str
    """Digest, by which prompts' blocks are hashed."""
    compatibility: str
    """KV moves only between equal ones."""
    load: LoadReport | None = None
    peers: dict[Incarnation, PeerHealth] = field(default_factory=dict)
    """The worker's links to those that hand over or lend to it, as last reported."""
    draining: bool = False
    note: WorkerNote = NO_NOTE
    """Facts from discovery."""
    num_legs: int = 0
    """Legs of this router under way on it."""
    leg_tokens: int = 0
    """Prompt tokens of those legs that no output has come for yet."""
    leg_compute_tokens: int = 0
    """Tokens among ``leg_tokens`` that the worker computes itself."""
    leg_prompts: int = 0
    """Legs that ``leg_tokens`` are of."""
    leg_whole_tokens: int = 0
    """Value of ``leg_tokens`` with nothing cached: a worker counts its waiting tokens so."""
    leg_whole_compute_tokens: int = 0
    """Tokens among ``leg_whole_tokens`` of legs that the worker computes itself."""
    num_streams: int = 0
    """Legs with output that go on: the decoding requests, as far as this router knows."""
    reported: tuple[int, int] = (0, 0)
    """``leg_whole_tokens`` and ``leg_whole_compute_tokens`` when the load report came: tokens that
    it states beyond them are of other routers."""
    peers_sent: dict[str, Incarnation] | None = None
    received_at: float = 0.0
    """Time of its last beat."""
    throughput: Window = field(default_factory=Window)
    """Rates of its steps, prompt tokens computed and tokens drawn."""

    @property
    def takes_new(self) -> bool:
        """Return whether new requests may be placed on the worker."""
        return not (self.draining or self.note.leaving)

    @property
    def sleeps(self) -> bool:
        """Return whether the worker last reported that it sleeps: it accepts nothing then."""
        return self.load is not None and self.load.sleeping

    @property
    def name(self) -> str:
        """Return a name for log lines: role, address, first digits of the incarnation."""
        return f"{self.role} {self.connection.endpoint} {self.incarnation.hex()[:8]}"
