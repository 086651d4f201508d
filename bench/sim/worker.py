"""A worker whose device is a clock: the real EngineCore and connectors, stepped as a worker's shell
steps them."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from bench.sim.clock import Clock
from bench.sim.executor import SimExecutor
from bench.sim.link import Consuming, Producing, Side
from bench.sim.times import Device, Way

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore, StepOutputs
from tandem.engine.scheduler.connector import KVConnector
from tandem.protocol.card import ModelCard, WorkerRole
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.messages import Frame, PeerHealth
from tandem.protocol.outputs import Refused
from tandem.protocol.requests import EngineCoreRequest
from tandem.router.dispatch.attempt import Leg
from tandem.router.workers.connection import Worker
from tandem.worker.connectors.consumer import DecodeConnector
from tandem.worker.connectors.producer import PrefillConnector


class SimWorker(Side):
    """One worker, and what the router keeps of it (``view``)."""

    def __init__(
        self,
        clock: Clock,
        way: Way,
        config: EngineConfig,
        device: Device,
        role: WorkerRole,
        number: int,
        seed: int,
    ) -> None:
        super().__init__()
        self._clock, self._way = clock, way
        self.incarnation = Incarnation(bytes([number]) * 16)
        self.executor = SimExecutor(device, self, seed + number)
        self.producing, self.consuming = Producing(self), Consuming(self)
        size = config.cache.block_size
        connector: KVConnector
        if role is WorkerRole.PREFILL:
            connector = PrefillConnector(cast(Any, self.producing), size)
        else:
            connector = DecodeConnector(cast(Any, self.consuming))
        capacity = self.executor.start(config)
        executor: Any = self.executor
        self.core = EngineCore(
            config, executor, capacity, connector=connector, gates=(), clock=lambda: self.now
        )
        self.card: ModelCard = self.core.card(role=role, incarnation=self.incarnation)
        self.connection = Connection(clock, way, self)
        endpoint: Any = self.connection
        known = self.core.fingerprint
        self.view = Worker(
            self.incarnation, self.card, endpoint, role, known.digest, known.compatibility
        )
        self._inbox: list[EngineCoreRequest | RequestKey] = []
        self._turns = False
        """Whether the loop is to look, or looks."""
        self._report = self.core.load_report()
        self._reported = 0.0
        self._step = 0
        self.notify = self._wake

    def take(self, item: EngineCoreRequest | RequestKey) -> None:
        """A request comes, or its cancellation."""
        self._inbox.append(item)
        self._wake()

    def beat(self) -> None:
        """Tell the router what the worker last reported, and how its links do."""
        if not self._turns:
            self.now = self._clock.now
            self._report = self.core.load_report()
        self.view.load = self._report
        self.view.reported = (
            self.view.leg_whole_tokens,
            self.view.leg_whole_compute_tokens,
        )
        self.view.peers = {
            peer: PeerHealth(
                peer,
                up=True,
                bytes_per_s=link.moved_bytes / link.busy if link.busy else 0.0,
                waiting_bytes=link.waiting_bytes,
            )
            for peer, link in self.consuming.links.items()
        }

    def _wake(self) -> None:
        if not self._turns:
            self._turns = True
            self._clock.at(self._clock.now + self._way.wake, self._turn)

    def _turn(self) -> None:
        """Run one round of the shell's loop. Its own time runs ahead of the clock while it
        waits for a step: nothing that happens meanwhile reaches it before the next round."""
        self.now = self._clock.now
        refused = []
        for item in self._inbox:
            if isinstance(item, RequestKey):
                self.core.abort(item)
                continue
            refusal = self.core.add(item)
            if refusal is not None:
                refused.append(Refused(item.key.request, item.key.attempt, refusal))
        self._inbox.clear()
        outputs = self.core.advance()
        self.core.observe()
        self._say(outputs, refused)
        if outputs.progressed:
            self._clock.at(self.now + self._way.turn, self._turn)
        else:
            self._turns = False

    def _say(self, outputs: StepOutputs, refused: list[Refused]) -> None:
        self._step += 1
        now = self.now
        for _, told, failed in outputs.by_router():
            frame = Frame(step=self._step, outputs=told, failed=failed)
            self._clock.at(now, partial(self.connection.hear, frame))
        late = [each for some in outputs.refused.values() for each in some]
        if refused or late or outputs.blocks is not None:
            frame = Frame(step=self._step, refused=(*refused, *late), blocks=outputs.blocks)
            self._clock.at(now, lambda: self.connection.hear(frame))
        if now - self._reported >= self._way.report:
            self._reported = now
            report = self.core.load_report()

            def publish() -> None:
                self._report = report

            self._clock.at(now, publish)


class Connection:
    """The router's link to a worker, with the face that ``Attempt`` calls."""

    def __init__(self, clock: Clock, way: Way, worker: SimWorker) -> None:
        self._clock, self._way, self._worker = clock, way, worker
        self._legs: dict[tuple[str, int], tuple[Leg, RequestKey]] = {}
        self.heard: list[Any] = []
        """Called with each leg that a frame had something for, and with blocks that changed."""

    @property
    def endpoint(self) -> str:
        """Return the name that is shown."""
        return f"sim-{self._worker.incarnation.hex()[:2]}"

    def submit(self, request: EngineCoreRequest, leg: Leg) -> bool:
        """Send; the link is always up."""
        key = request.key
        self._legs[key.request, key.attempt] = leg, key
        self._clock.at(self._clock.now + self._way.submit, lambda: self._worker.take(request))
        return True

    def release(self, request: str, attempt: int, *, cancel: bool) -> None:
        """Hear no more of it."""
        _, key = self._legs.pop((request, attempt))
        if cancel:
            self._clock.at(self._clock.now + self._way.submit, lambda: self._worker.take(key))

    def hear(self, frame: Frame) -> None:
        """Hand a frame's events to the legs that they are of."""
        if frame.blocks is not None:
            for hear_blocks, _ in self.heard:
                hear_blocks(self._worker.view, frame.blocks)
        for event in (*frame.outputs, *frame.failed, *frame.refused):
            found = self._legs.get((event.request, event.attempt))
            if found is not None:
                found[0].receive(event)
                for _, hear_leg in self.heard:
                    hear_leg(event.request)
