"""Consumer: a worker that takes KV from prefill workers.

Contract: each opened key ends in exactly one of ``Loaded``, ``LoadFailed``,
``Cancelled``. Until then the engine neither reads nor frees the blocks of ``begin_load``; with
``blocks_free=False`` it waits for ``Released``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.client import ControlClient
from tandem.kvtransfer.control.mail import SetPeers
from tandem.kvtransfer.events import ConsumerEvent, LoadFailed, Ready, Released
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.mover.consumer import ConsumerMover
from tandem.kvtransfer.mover.mover import Reserved, SleepState
from tandem.kvtransfer.service.parts import make_parts, tell_transports
from tandem.kvtransfer.transports.base import Transport
from tandem.link.curve import CurveGuard
from tandem.protocol.card import Fingerprint, KVLayout
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import BlockTables
from tandem.protocol.messages import PeerHealth


class HandoffConsumer:
    """Consumer; all methods are for the engine's thread and return at once."""

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
        kv_scales: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """``kv_cache``: dense memory of ``num_blocks`` blocks, any dtype. ``notify`` is called on
        another thread whenever ``poll`` has something. ``kv_scales``: the model's scales of codes,
        one for each of a group's ``num_rows``; None is 1. Raises TransportError."""
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
            kv_scales=kv_scales,
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
        self._mover.start()
        self._channel.start()

    def close(self) -> None:
        """End both threads and notify the producers. May be called twice."""
        self._channel.stop()
        self._mover.stop()

    # Peers.

    def set_peers(self, controls: Mapping[str, Incarnation] | Iterable[str]) -> None:
        """Keep links to these control sockets (``host:port``) only. A mapping names their
        incarnations; other peers that are down are forgotten."""
        if isinstance(controls, Mapping):
            self._wanted = frozenset(controls.values())
            self._mover.book.keep(self._wanted)
        self._channel.post(SetPeers(() if self.ended() else tuple(controls)))

    def peer_up(self, producer: Incarnation) -> bool:
        """Return whether a hand-off from this worker may start: linked, probed, not quarantined,
        threads running."""
        return self.ended() is None and self._mover.book.is_up(producer)

    def why_down(self, producer: Incarnation) -> str:
        return self.ended() or self._mover.book.why_down(producer)

    def peer_health(self) -> tuple[PeerHealth, ...]:
        known, ended = self._mover.book.snapshot(), self.ended()
        if ended is None:
            return known
        return tuple(structs.replace(each, up=False, reason=ended) for each in known)

    # One hand-off.

    def open(
        self,
        key: RequestKey,
        producer: Incarnation,
        *,
        budget_ms: int | None,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Open the key at ``producer``; without a link it fails by an event. ``hashes`` request
        cached leading blocks instead of computed ones."""
        self._open[key] = producer
        opened = d_events.Opened(key, producer, budget_ms, link_up=True, hashes=tuple(hashes))
        self._mover.inbox.put(opened)

    @property
    def wants_hashes(self) -> bool:
        """Return whether ``begin_load`` requires block hashes: blocks are copied, and have tags."""
        return self._wants_hashes

    def hashed_as(self, key: RequestKey) -> Fingerprint:
        """Return the fingerprint, with the producer's block size, for the key's block hashes."""
        own, peer = self._fingerprint, self._open.get(key)
        size = self._mover.ends.block_size(peer) if peer else None
        if size is None or size == own.layout.block_size:
            return own
        return own.with_block_size(size)

    def begin_load(
        self,
        key: RequestKey,
        tables: BlockTables,
        from_token: int,
        to_token: int,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Load tokens [from_token, to_token) into ``tables`` (whole ones, by group, hits first)
        after ``Ready``, which names ``to_token``. ``from_token`` is a multiple of the block size,
        or ``to_token`` if only token 1 is missing. ``hashes``, made with ``hashed_as``, are of all
        full blocks."""
        self._mover.inbox.put(Reserved(key, tables, from_token, to_token, tuple(hashes)))

    def cancel(self, key: RequestKey) -> None:
        """Cancel the key; ``Cancelled`` follows, unless another ending is already queued."""
        self._mover.inbox.put(d_events.Cancel(key))

    def poll(self) -> list[ConsumerEvent]:
        """Return the events since the last call; call it once a step."""
        ended = not self._mover.alive  # first: the thread may still report endings
        polled = self._mover.events()
        for event in polled:
            self._account(event)
        if ended:
            polled += self._endings()
        return polled

    def _account(self, event: ConsumerEvent) -> None:
        if isinstance(event, Released):
            self._writing.discard(event.key)
        elif not isinstance(event, Ready):
            self._open.pop(event.key, None)
            if not getattr(event, "blocks_free", True):
                self._writing.add(event.key)

    def _endings(self) -> list[ConsumerEvent]:
        why, left = self._mover.problem or "", self._mover.written
        endings: list[ConsumerEvent] = [Released(key) for key in self._writing - left]
        endings += [
            LoadFailed(key, FailCause.INTERNAL, why, blocks_free=key not in left)
            for key in self._open
        ]
        self._writing = (self._writing | self._open.keys()) & left
        self._open.clear()
        return endings

    # State.

    def has_pending(self) -> bool:
        return bool(self._open or self._writing)

    def leased_blocks(self) -> int:
        return 0

    def progress(self) -> int:
        return self._board.transfers

    def expected(self) -> float:
        """Return the predicted end of the first copy, by ``time.monotonic``; inf if unknown. The
        engine is woken once it is known."""
        return self._mover.reads.expected

    def keeps_awake(self) -> str | None:
        """Return None: peers do not map this memory, and without requests nothing writes it."""
        return None

    def sleep(self) -> int:
        """Release the memory of incoming KV while the engine sleeps; return its bytes. A link's
        probe allocates it again for a moment."""
        freed = self._mover.resting_bytes
        self._mover.inbox.put(SleepState(asleep=True))
        return freed

    def wake_up(self) -> None:
        self._mover.inbox.put(SleepState(asleep=False))

    def note_progress(self, engine_step: int, has_work: bool) -> None:
        self._board.note_engine(has_work)

    def ended(self) -> str | None:
        return self._mover.ending or self._channel.problem

    def problem(self) -> str | None:
        gone = self.ended()
        if gone is not None:
            return gone
        ring = self._mover.table.ring
        if 2 * ring.quarantined > len(ring):
            return f"{ring.quarantined} of {len(ring)} receive slots wait for reads that hang"
        patience, quota = 2 * self._mover.config.kv_transfer_seconds, ring.per_peer
        if hanging := self._mover.reads.old_copies(patience):
            # All links use the one device, and each copy keeps its request's blocks.
            return f"{hanging} copies into blocks hang"
        if any(each.up for each in self._mover.book.snapshot()):
            return None  # hand-offs go on, and routers know the link that is down
        stuck = self._wanted & self._mover.reads.stuck(patience, quota)
        if not stuck:
            return None
        slots = f"the {quota} receive slots that {min(stuck).hex()[:8]} may have"
        return f"{slots} wait for reads that hang: there is no link to it, nor to another producer"
