"""Workers of this router, by address and, while up, by incarnation.

Owns the connections, and sends workers the peers to link to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from tandem.link.liveness import LinkTimes
from tandem.link.session import LinkState, Terms
from tandem.link.sockets import roomy
from tandem.protocol.card import PROTOCOL_VERSION, ModelCard, WorkerRole
from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.ids import NO_INCARNATION, Incarnation
from tandem.protocol.keys import KeyRing
from tandem.protocol.messages import PeerHealth, WorkerBeat
from tandem.protocol.outputs import BlockEvents
from tandem.router.workers.connection import (
    NO_NOTE,
    Admitted,
    LinkContext,
    Worker,
    WorkerConnection,
    WorkerNote,
    admitted_templates,
)
from tandem.router.workers.rates import Naps


def controls_of(worker: Worker, workers: Iterable[Worker]) -> dict[str, Incarnation]:
    """Return the control sockets to link to, with their incarnations."""
    able = [
        each
        for each in workers
        if each.card.control is not None
        and each.compatibility == worker.compatibility
        and each.incarnation != worker.incarnation
    ]
    takes = worker.role is WorkerRole.DECODE
    giving = [each for each in able if takes and each.role is WorkerRole.PREFILL]
    lending = [
        each
        for each in able
        if each.card.pull_peers and each.fingerprint == worker.fingerprint and each not in giving
    ]
    lending.sort(key=lambda each: (each.incarnation < worker.incarnation, each.incarnation))
    chosen = [*giving, *lending[: worker.card.pull_peers]]
    return {each.card.control: each.incarnation for each in chosen if each.card.control}


def handoff_peers(
    worker: Worker, workers: Mapping[Incarnation, Worker]
) -> Mapping[Incarnation, PeerHealth]:
    """Return a worker's links for hand-offs: to all but known decode workers."""
    if worker.role is not WorkerRole.DECODE:
        return {}
    if not worker.card.pull_peers:
        return worker.peers
    lending = {each for each, known in workers.items() if known.role is WorkerRole.DECODE}
    return {peer: health for peer, health in worker.peers.items() if peer not in lending}


logger = logging.getLogger(__name__)

_TICKS_PER_BEAT = 4
DRAIN_SECONDS = 5.0
"""Deadline of a worker's answer that it drains."""


class PoolListener(Protocol):
    """Receiver of the pool's events; called in the loop, never blocks."""

    def worker_up(self, worker: Worker) -> None:
        """Note that a worker may get requests."""
        ...

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Note that a worker is lost; its keys have failed."""
        ...

    def worker_blocks(self, worker: Worker, events: BlockEvents) -> None: ...


class DropCounter(Protocol):
    """Counter of dropped frames."""

    def dropped(self, reason: str) -> None: ...


class WorkerPool:
    """Pool of workers: ``start`` in the serving loop, then ``add`` and ``remove``."""

    def __init__(
        self,
        me: Incarnation,
        *,
        times: LinkTimes,
        counter: DropCounter,
        curve: KeyRing | None = None,
    ) -> None:
        self.me = me
        self.workers: dict[Incarnation, Worker] = {}
        self._times = times
        self._counter = counter
        self.curve = curve
        self._listener: PoolListener | None = None
        self._links: dict[str, WorkerConnection] = {}
        self._parked: dict[str, str] = {}
        """Addresses of workers that are linked at another address, and that one."""
        self._notes: dict[str, WorkerNote] = {}
        self._context: LinkContext | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._drains: set[asyncio.Task[Reply]] = set()

    def start(self, listener: PoolListener) -> None:
        """Begin to tick; ``listener`` receives all events."""
        self._listener = listener
        self._context = LinkContext(
            zmq=roomy(),
            terms=Terms(self.me, "protocol", PROTOCOL_VERSION, self._times, forgiving=True),
            dropped=self._counter.dropped,
            curve=self.curve,
        )
        self._ticker = asyncio.create_task(self._tick(), name="worker-pool-ticks")

    async def close(self) -> None:
        """Fail running requests and close all sockets. May be called twice."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        for endpoint in list(self._links):
            self.remove(endpoint)
        if self._context is not None:
            self._context.zmq.term()
            self._context = None

    def add(self, endpoint: str) -> None:
        assert self._context is not None, "add() before start()"
        if endpoint not in self._links:
            self._links[endpoint] = WorkerConnection(self._context, endpoint, self)

    def remove(self, endpoint: str) -> None:
        """Remove an address; its requests fail."""
        self._notes.pop(endpoint, None)
        self._parked.pop(endpoint, None)
        connection = self._links.pop(endpoint, None)
        if connection is not None:
            connection.close()
        for other in [each for each, where in self._parked.items() if where == endpoint]:
            self.reconnect(other)

    def note(self, endpoint: str, note: WorkerNote) -> None:
        """Store discovery's facts of an address."""
        if self._notes.get(endpoint, NO_NOTE) == note:
            return
        self._notes[endpoint] = note
        for worker in self.workers.values():
            if worker.connection.endpoint == endpoint:
                worker.note = note
        self._announce()

    @property
    def admitted(self) -> Admitted:
        """Return the revisions that serve users, of workers with this protocol; None is all."""
        if not self._notes:
            return None
        links = self._links
        return admitted_templates(
            note
            for endpoint, note in self._notes.items()
            if endpoint not in links or not links[endpoint].other_wire
        )

    def refused(self) -> list[str]:
        """Return the addresses of workers with other keys."""
        return sorted(where for where, each in self._links.items() if each.is_refused)

    def other_wires(self) -> dict[str, str]:
        return {where: each.other_wire for where, each in self._links.items() if each.other_wire}

    def drain(self, endpoint: str, grace_ms: int) -> None:
        """Notify the worker at an address that its process ends in ``grace_ms``."""
        connection = self._links.get(endpoint)
        if connection is None or connection.state is not LinkState.UP:
            return
        command = Command(id=0, name=CommandName.DRAIN, args={"grace_ms": grace_ms})
        task = asyncio.create_task(connection.call(command, DRAIN_SECONDS))
        self._drains.add(task)
        task.add_done_callback(self._drained)

    def _drained(self, task: asyncio.Task[Reply]) -> None:
        self._drains.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.info("a worker that leaves did not answer: %s", task.exception())

    def reconnect(self, endpoint: str) -> None:
        """Resolve the address again, unless its worker is linked."""
        other = self._links.get(self._parked.get(endpoint, ""))
        if other is not None and other.state is LinkState.UP:
            return
        self._parked.pop(endpoint, None)
        if endpoint in self._links:
            self._links[endpoint].reconnect()

    def links(self) -> dict[str, LinkState]:
        return {endpoint: link.state for endpoint, link in self._links.items()}

    def up(self, role: WorkerRole) -> list[Worker]:
        """Return the workers of a role that accept requests."""
        return [w for w in self.workers.values() if w.role is role and w.takes_new]

    def serving(self, role: WorkerRole) -> list[Worker]:
        """Return the workers of a role with an admitted revision."""
        admitted = self.admitted
        return [w for w in self.up(role) if admitted is None or w.note.template in admitted]

    async def wait_change(self, timeout: float) -> bool:
        """Wait for a change of a worker or its links; False at the timeout."""
        try:
            # wait_for swallows a cancel right after the change (3.11).
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _announce(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _tick(self) -> None:
        naps = Naps(asyncio.get_running_loop(), self._times.beat_interval / _TICKS_PER_BEAT)
        while True:
            late = await naps.sleep()
            if late > self._times.beat_interval:
                logger.warning("the router stood still for %.1f s", late)
            for connection in list(self._links.values()):
                try:
                    connection.tick(late)
                except Exception:  # of one link: the others still require beats
                    logger.exception("the link to %s failed to tick", connection.endpoint)

    # Callbacks of connections.

    def _problem(self, connection: WorkerConnection, card: ModelCard) -> str | None:
        """Return the reason that a card cannot be used, or None."""
        if card.role is None:
            return "it names no role"
        if card.fingerprint.version != PROTOCOL_VERSION:
            return f"it speaks protocol {card.fingerprint.version}, not {PROTOCOL_VERSION}"
        return None

    def on_up(self, connection: WorkerConnection, card: ModelCard) -> None:
        known = self.workers.get(connection.incarnation or NO_INCARNATION)
        if known is not None and known.connection is not connection:
            self._park(connection, known.connection.endpoint)
            return
        problem = self._problem(connection, card)
        if problem is not None:
            logger.warning("worker at %s is not used: %s", connection.endpoint, problem)
            return
        assert connection.incarnation is not None
        assert card.role is not None
        worker = Worker(
            incarnation=connection.incarnation,
            card=card,
            connection=connection,
            role=card.role,
            fingerprint=card.fingerprint.digest,
            compatibility=card.fingerprint.compatibility,
            note=self._notes.get(connection.endpoint, NO_NOTE),
        )
        self.workers[worker.incarnation] = worker
        logger.info("%s is up, serving %s", worker.name, card.model)
        if self._listener is not None:
            self._listener.worker_up(worker)
        self._send_peers()
        self._announce()

    def _park(self, connection: WorkerConnection, other: str) -> None:
        """Park a connection to a worker that is linked at another address.

        A worker keeps one link to each router: two addresses would end each other's.
        """
        why = f"it is the one at {other}"
        logger.warning("worker at %s is not used: %s", connection.endpoint, why)
        self._parked[connection.endpoint] = other
        connection.park(why)

    def on_refused(self, connection: WorkerConnection) -> None:
        self._announce()

    def on_lost(self, connection: WorkerConnection, incarnation: Incarnation, reason: str) -> None:
        worker = self.workers.get(incarnation)
        if worker is None or worker.connection is not connection:
            return
        del self.workers[incarnation]
        if self._listener is not None:
            self._listener.worker_lost(worker, reason)
        self._send_peers()
        self._announce()

    def on_beat(self, connection: WorkerConnection, beat: WorkerBeat) -> None:
        worker = self._of(connection)
        if worker is None:
            return
        slept, worker.load = worker.sleeps, beat.load
        load = beat.load
        worker.reported = (worker.leg_whole_tokens, worker.leg_whole_compute_tokens)
        worker.received_at = time.monotonic()
        counters = (beat.beat.engine_step, load.computed_tokens, load.generated_tokens)
        worker.throughput.note(worker.received_at, *counters)
        peers = {health.peer: health for health in beat.peers}
        changed = _standing(peers) != _standing(worker.peers)
        changed = changed or beat.load.draining != worker.draining or worker.sleeps != slept
        worker.peers = peers
        if beat.load.draining:
            worker.draining = True
        if changed:
            self._announce()

    def on_blocks(self, connection: WorkerConnection, events: BlockEvents) -> None:
        worker = self._of(connection)
        if worker is not None and self._listener is not None:
            self._listener.worker_blocks(worker, events)

    def on_draining(self, connection: WorkerConnection, grace_ms: int) -> None:
        worker = self._of(connection)
        if worker is not None:
            logger.info("%s drains, for at most %d ms", worker.name, grace_ms)
            worker.draining = True
            self._announce()

    def _of(self, connection: WorkerConnection) -> Worker | None:
        if connection.incarnation is None:
            return None
        worker = self.workers.get(connection.incarnation)
        return worker if worker is not None and worker.connection is connection else None

    def _send_peers(self) -> None:
        for worker in self.workers.values():
            controls = controls_of(worker, self.workers.values())
            # An empty first set only shows that this router has just begun to look.
            if controls != (worker.peers_sent or {}):
                worker.connection.send_peers(controls)
                worker.peers_sent = controls


def _standing(peers: Mapping[Incarnation, PeerHealth]) -> dict[Incarnation, tuple[bool, str]]:
    """Return the state of peers without the links' speed and load."""
    return {peer: (health.up, health.reason) for peer, health in peers.items()}
