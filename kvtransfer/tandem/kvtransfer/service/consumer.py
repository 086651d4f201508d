"""The consumer: a worker that takes KV from prefill workers and goes on with it.

Contract: each opened key ends in exactly one of ``Loaded``, ``FirstTokenEnded``, ``LoadFailed``,
``Cancelled``. Until then the engine neither reads nor frees the blocks given to ``begin_load``;
where the event says ``blocks_free=False`` it waits for ``BlocksFree``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.client import ControlClient
from tandem.kvtransfer.control.mail import SetPeers
from tandem.kvtransfer.events import BlocksFree, ConsumerEvent, Ready
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.mover.consumer import ConsumerMover
from tandem.kvtransfer.mover.mover import Reserved, SleepState
from tandem.kvtransfer.service.parts import make_parts, tell_transports
from tandem.kvtransfer.transports.base import Transport
from tandem.link.curve import CurveGuard
from tandem.protocol.card import Fingerprint
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import LoadFailed
from tandem.protocol.layout import KVLayout
from tandem.protocol.messages import PeerHealth


class HandoffConsumer:
    """All methods are for the engine's thread and return at once."""

    def __init__(
        self,
        config: KVTransferConfig,
        *,
        kv_cache: Tensor,
        layout: KVLayout,
        num_blocks: int,
        fingerprint: Fingerprint,
        incarnation: Incarnation,
        registry: CollectorRegistry,
        notify: Callable[[], None],
        transports: dict[str, Transport] | None = None,
        guard: CurveGuard | None = None,
    ) -> None:
        """``kv_cache``: dense memory of ``num_blocks`` blocks, any dtype. ``notify`` is called on
        another thread whenever ``poll`` has something. Raises TransportError."""
        parts = make_parts(
            config,
            "consumer",
            kv_cache=kv_cache,
            layout=layout,
            num_blocks=num_blocks,
            fingerprint=fingerprint,
            incarnation=incarnation,
            registry=registry,
            notify=notify,
            transports=transports,
        )
        self._board = parts.board
        wanted = next(iter(parts.transports))
        self._mover = ConsumerMover(parts)
        tell_transports(parts, "consumer", wanted)
        self._wants_hashes = bool(parts.direct)
        self._channel = ControlClient(
            config,
            incarnation,
            parts.fingerprint.compatibility,
            board=parts.board,
            metrics=parts.metrics,
            deliver=self._mover.inbox.put,
            offer=self._mover.inbox.offer,
            guard=guard,
        )
        self._channel.connectors = tuple(parts.transports)
        self._channel.on_end = notify
        self._mover.control = self._channel
        self._fingerprint = fingerprint
        self._wanted: frozenset[Incarnation] = frozenset()
        """Producers that routers name with their incarnation."""
        self._open: dict[RequestKey, Incarnation] = {}
        self._writing: set[RequestKey] = set()
        """Keys that have ended and whose blocks are not free."""

    def start(self) -> None:
        """Start both threads."""
        self._mover.start()
        self._channel.start()

    def close(self) -> None:
        """End both threads and notify the producers. May be called twice."""
        self._channel.stop()
        self._mover.stop()

    # Peers

    def set_peers(self, controls: Mapping[str, Incarnation] | Iterable[str]) -> None:
        """Keep links to these control sockets (``host:port``), and to no others. A mapping names
        their incarnations: other peers that are down are forgotten."""
        if isinstance(controls, Mapping):
            self._wanted = frozenset(controls.values())
            self._mover.book.keep(self._wanted)
        self._channel.post(SetPeers(() if self.ended() else tuple(controls)))

    def peer_up(self, producer: Incarnation) -> bool:
        """Return whether a hand-off from this prefill worker may start: linked, same
        fingerprint, the probe passed, not quarantined; and both threads run."""
        return self.ended() is None and self._mover.book.is_up(producer)

    def why_down(self, producer: Incarnation) -> str:
        """Return why ``peer_up`` is False."""
        return self.ended() or self._mover.book.why_down(producer)

    def peer_health(self) -> tuple[PeerHealth, ...]:
        """Return every prefill worker that was seen, and is linked or still named."""
        known, ended = self._mover.book.snapshot(), self.ended()
        if ended is None:
            return known
        return tuple(structs.replace(each, up=False, reason=ended) for each in known)

    # One hand-off

    def open(
        self,
        key: RequestKey,
        producer: Incarnation,
        *,
        budget_ms: int | None,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Ask ``producer`` for the key; without a link the key fails by an event. ``hashes``: not
        for what it computes under the key, but for what it has cached of these leading blocks."""
        self._open[key] = producer
        opened = d_events.Opened(key, producer, budget_ms, link_up=True, hashes=tuple(hashes))
        self._mover.inbox.put(opened)

    @property
    def wants_hashes(self) -> bool:
        """Return whether ``begin_load`` requires block hashes: blocks are copied, and have tags."""
        return self._wants_hashes

    def hashed_as(self, key: RequestKey) -> Fingerprint:
        """Return the fingerprint, with the block size of the key's producer, for block hashes."""
        own, peer = self._fingerprint, self._open.get(key)
        size = self._mover.ends.block_size(peer) if peer else None
        if size is None or size == own.layout.block_size:
            return own
        return own.with_block_size(size)

    def begin_load(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        from_token: int,
        to_token: int,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Bring tokens [from_token, to_token) into ``block_ids`` after ``Ready``. ``block_ids``
        is the whole table with local hits first. ``from_token`` is a multiple of the block size,
        or equal to ``to_token`` (a full hit: only token 1 is needed). ``to_token`` is that of
        ``Ready``. ``hashes``, if any, are those of all full blocks up to there, made with
        ``hashed_as``."""
        self._mover.inbox.put(Reserved(key, tuple(block_ids), from_token, to_token, tuple(hashes)))

    def cancel(self, key: RequestKey) -> None:
        """Cancel the key; ``Cancelled`` follows, unless another ending is already queued."""
        self._mover.inbox.put(d_events.Cancel(key))

    def poll(self) -> list[ConsumerEvent]:
        """Return the events since the last call; once a step."""
        ended = not self._mover.alive  # asked first: it may end, and say how a key ended, meanwhile
        polled = self._mover.events()
        for event in polled:
            self._account(event)
        if ended:
            polled += self._endings()
        return polled

    def _account(self, event: ConsumerEvent) -> None:
        if isinstance(event, BlocksFree):
            self._writing.discard(event.key)
        elif not isinstance(event, Ready):
            self._open.pop(event.key, None)
            if not getattr(event, "blocks_free", True):
                self._writing.add(event.key)

    def _endings(self) -> list[ConsumerEvent]:
        """End every key after the transfer thread has ended. Blocks are free, except those that
        a device may still write, which stay until the process ends."""
        why, left = self._mover.problem or "", self._mover.written
        endings: list[ConsumerEvent] = [BlocksFree(key) for key in self._writing - left]
        endings += [
            LoadFailed(key, FailCause.INTERNAL, why, blocks_free=key not in left)
            for key in self._open
        ]
        self._writing = (self._writing | self._open.keys()) & left
        self._open.clear()
        return endings

    # State

    def has_pending(self) -> bool:
        """Return whether a key is open, or blocks are still written."""
        return bool(self._open or self._writing)

    def leased_blocks(self) -> int:
        """Return 0: a decode worker leases no blocks."""
        return 0

    def progress(self) -> int:
        """Return a counter that grows while parts are read and unpacked."""
        return self._board.transfers

    def expected(self) -> float:
        """Return when the first copy is likely to end, by ``time.monotonic``; inf if none is
        foretold. The engine is woken when that becomes known."""
        return self._mover.reads.expected

    def keeps_awake(self) -> str | None:
        """Return None: peers do not map this memory, and without requests nothing writes it."""
        return None

    def sleep(self) -> int:
        """Release the memory of incoming KV while the engine sleeps without requests; return its
        bytes. A link's probe allocates it again for a moment."""
        freed = self._mover.resting_bytes
        self._mover.inbox.put(SleepState(asleep=True))
        return freed

    def wake_up(self) -> None:
        """Report that the engine is awake; the first read allocates the memory again."""
        self._mover.inbox.put(SleepState(asleep=False))

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        """Record a step of the engine's loop for the beats."""
        self._board.note_engine(has_work)

    def ended(self) -> str | None:
        """Return why no hand-off will ever work here again, or None: a thread has ended."""
        return self._mover.ending or self._channel.problem

    def problem(self) -> str | None:
        """Return why this worker must not be given hand-offs any more, or None."""
        gone = self.ended()
        if gone is not None:
            return gone
        ring = self._mover.table.ring
        if 2 * ring.quarantined > len(ring):
            return f"{ring.quarantined} of {len(ring)} receive slots wait for reads that hang"
        patience, quota = 2 * self._mover.config.kv_transfer_seconds, ring.per_peer
        if hanging := self._mover.reads.old_copies(patience):
            # Whatever links do: all go by the one device, and each keeps the blocks of its request.
            return f"{hanging} copies into blocks hang"
        if any(each.up for each in self._mover.book.snapshot()):
            return None  # hand-offs go on, and routers hear of the link that is down
        stuck = self._wanted & self._mover.reads.stuck(patience, quota)
        if not stuck:
            return None
        slots = f"the {quota} receive slots that {min(stuck).hex()[:8]} may have"
        return f"{slots} wait for reads that hang: there is no link to it, nor to another producer"
