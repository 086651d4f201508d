"""Worker process around EngineCore: its step loop in the main thread, links, probes, signals,
drain.

The role is a ``KVConnector`` in the EngineCore and a ``HandoffService``.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType

from msgspec import structs
from prometheus_client import CollectorRegistry

from tandem.engine.core.engine_core import EngineCore, StepOutputs
from tandem.engine.threads import IdlePoll
from tandem.link.curve import CurveGuard
from tandem.link.naps import nap_precisely
from tandem.protocol.card import ModelCard, WorkerRole
from tandem.protocol.commands import Command, CommandName
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.messages import (
    Beat,
    Call,
    Cancel,
    Draining,
    Frame,
    PeerSet,
    ReplyTo,
    Submit,
    WorkerBeat,
)
from tandem.protocol.outputs import (
    Accepted,
    BlockEvents,
    EngineOutput,
    Failed,
    Refused,
    frame_bytes,
)
from tandem.protocol.timeline import LegTimes, Note, NoteBook
from tandem.tracing.config import is_sampled
from tandem.tracing.spans import OpenSpan, Spans
from tandem.worker.cache_snapshots import CacheSnapshots
from tandem.worker.handoff import HandoffService, PeerSets
from tandem.worker.io import (
    FromRouter,
    Inbox,
    IOThread,
    LinkMetrics,
    RouterFound,
    RouterLost,
)
from tandem.worker.server_config import ServerConfig
from tandem.worker.worker_probes import WorkerProbes

TICK_SECONDS = 0.04
"""Largest error of a stop's recorded times."""
STILL_SECONDS = 0.15
"""Shortest stop that counts, above a busy machine's delays."""
LINGER_SECONDS = 2.0
"""Seconds for which it runs after the last ``watch``."""
MAX_STOPS = 32


class StallWatchdog(threading.Thread):
    """Watchdog; call ``watch`` while a request is watched."""

    def __init__(self) -> None:
        super().__init__(name="tandem-stillness", daemon=True)
        self._stops: deque[Note] = deque(maxlen=MAX_STOPS)
        self._watching = threading.Event()
        self._until = 0.0
        self._asleep_since = 0.0
        self._over = False

    def watch(self) -> None:
        """Watch for stops; call it about twice a second while a request is watched."""
        now = time.monotonic()
        self._until = now + LINGER_SECONDS
        if not self._watching.is_set():
            self._asleep_since = now  # a stop before the thread wakes counts, too
            self._watching.set()

    def stop(self) -> None:
        self._over = True
        self._watching.set()

    def stops(self) -> tuple[Note, ...]:
        """Return the last stops on the monotonic clock, including one that has just ended."""
        now, since = time.monotonic(), self._asleep_since
        if since and now - since - TICK_SECONDS >= STILL_SECONDS:
            return (*self._stops, Note("stopped", since, now, 1))
        return tuple(self._stops)

    def run(self) -> None:
        while not self._over:
            self._watching.wait()
            since = self._asleep_since or time.monotonic()
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            if now - since - TICK_SECONDS >= STILL_SECONDS:
                self._stops.append(Note("stopped", since, now, 1))
            self._asleep_since = now  # the next tick begins where this one ends
            if now > self._until:
                self._watching.clear()
                self._asleep_since = 0.0
                if self._until > now:  # ``watch`` was called meanwhile
                    self._asleep_since = now
                    self._watching.set()


RELEASE_SECONDS = 10.0
"""Seconds after the hand-back in which peers can fetch leased KV."""
KILL_MARGIN = 30.0
"""Seconds before a known kill for hand-back and release; at most half of the time left."""


class Drain:
    """Drain of a worker; ``begin`` is callable from any thread."""

    def __init__(self) -> None:
        self._ends: tuple[float, float] | None = None
        """Times at which running requests are handed back and the wait for peers ends."""

    @property
    def begun(self) -> bool:
        return self._ends is not None

    def begin(self, now: float, grace: float) -> bool:
        """Begin to drain with ``grace`` seconds for running requests; return False if one ends
        earlier.

        A grace of zero ends at once, without a wait for peers.
        """
        hand_back = now + grace
        if self._ends is not None and self._ends[0] <= hand_back:
            return False
        self._ends = (hand_back, hand_back + (RELEASE_SECONDS if grace else 0.0))
        return True

    def hands_back(self, now: float) -> bool:
        """Return whether running requests are to be handed back now."""
        return self._ends is not None and now >= self._ends[0]

    def over(self, now: float) -> bool:
        return self._ends is not None and now >= self._ends[1]


def grace_before(killed_in: float) -> float:
    """Return the grace in seconds before a kill in ``killed_in`` seconds."""
    return max(killed_in / 2, killed_in - KILL_MARGIN)


FRAME_BYTES = 16 << 20
"""Bytes of outputs in one frame, so that other messages are not delayed; a larger output is sent
alone."""
FRAME_BLOCKS = 1 << 14
"""Block hashes in one frame, so that the router's loop is not blocked."""


def step_frames(
    step: int,
    outputs: tuple[EngineOutput, ...],
    failed: tuple[Failed, ...],
    times: tuple[LegTimes, ...],
) -> Iterator[Frame]:
    """Yield the frames of a step, mostly one. ``times`` go with the first, before a request's last
    output; ``failed`` with the last."""
    *before, last = _parts(outputs, FRAME_BYTES)
    for part in before:
        yield Frame(step=step, outputs=part, times=times)
        times = ()
    yield Frame(step=step, outputs=last, failed=failed, times=times)


def block_frames(step: int, events: BlockEvents | None) -> Iterator[Frame]:
    """Yield the frames of block events, mostly one; none without events."""
    if events is None:
        return
    stored, removed = events.stored, events.removed
    for begin in range(0, max(1, len(stored), len(removed)), FRAME_BLOCKS):
        end = begin + FRAME_BLOCKS
        cleared = events.cleared and not begin
        part = BlockEvents(stored[begin:end], removed[begin:end], cleared)
        yield Frame(step=step, blocks=part)


def _parts(outputs: Sequence[EngineOutput], limit: int) -> Iterator[tuple[EngineOutput, ...]]:
    begin = size = 0
    for at, output in enumerate(outputs):
        more = frame_bytes(output)
        if size and size + more > limit:
            yield tuple(outputs[begin:at])
            begin, size = at, 0
        size += more
    yield tuple(outputs[begin:])


_HANDOFF = ("wait", "reserve", "load", "commit")
_ENDED_BADLY = ("abort", "error")


def write_spans(spans: Spans, role: str, book: NoteBook, now: float, stops: Sequence[Note]) -> None:
    """Write spans of queue, chunks, hand-off and decoding; stops and preemptions are their
    events."""
    offset = time.time() - time.monotonic()
    notes = {each.name: each for each in book.notes}
    whole = spans.begin(role, book.arrived + offset, book.watch.traceparent)
    for each in book.notes:
        if each.name == "chunk":
            tokens = {"tandem.num_tokens": each.amount}
            whole.child("chunk", each.begin + offset, attributes=tokens).end(each.end + offset)
        elif each.name == "preempted":
            whole.event("preempted", each.begin + offset)
    if "wait" in notes:
        _write_handoff(whole, book, offset)
    elif (queue := notes.get("queue")) is not None:
        whole.child("queue", queue.begin + offset).end(queue.end + offset)
    decode = notes.get("decode")
    if decode is not None and role == "decode":
        span = whole.child("tokens", decode.begin + offset)
        span.event("first token", decode.begin + offset)
        span.end(decode.end + offset, {"gen_ai.usage.output_tokens": decode.amount})
    for stop in stops:
        if stop.end > book.arrived:
            seconds = {"tandem.seconds": stop.end - stop.begin}
            whole.event("stood still", stop.begin + offset, seconds)
    attributes: dict[str, str | int] = {
        "tandem.request_id": book.watch.request_id,
        "tandem.attempt": book.key.attempt,
        "tandem.finish": book.why,
    }
    failed = book.why if book.why in _ENDED_BADLY else None
    whole.end(now + offset, attributes, failed)


def _write_handoff(whole: OpenSpan, book: NoteBook, offset: float) -> None:
    stretches = [each for each in book.notes if each.name in _HANDOFF]
    begin, end = min(each.begin for each in stretches), max(each.end for each in stretches)
    handoff = whole.child("hand-off", begin + offset)
    for each in stretches:
        handoff.child(each.name, each.begin + offset).end(each.end + offset)
    for part in book.notes:
        if part.name == "part":
            rate = part.amount / max(part.end - part.begin, 1e-9)
            attributes = {"tandem.bytes": part.amount, "tandem.bytes_per_s": rate}
            handoff.event("part", part.end + offset, attributes)
    handoff.end(end + offset, {"tandem.bytes": sum(e.amount for e in stretches)})


logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""Maximum wait of an idle loop, after which it checks deadlines."""
PARKED_SECONDS = 0.05
"""Maximum wait while requests wait for what may not wake the loop."""
LOAD_SECONDS = 0.2


class EngineCoreProc:
    """Worker process; ``run`` returns exit status 0 after a clean drain."""

    def __init__(
        self,
        *,
        core: EngineCore,
        handoff: HandoffService,
        card: ModelCard,
        server: ServerConfig,
        probes: WorkerProbes,
        inbox: Inbox,
        registry: CollectorRegistry,
        guard: CurveGuard | None = None,
        spans: Spans | None = None,
    ) -> None:
        assert card.incarnation is not None
        self._core = core
        self._handoff = handoff
        self._returns_queue = card.role is WorkerRole.PREFILL
        """Whether a drain returns waiting requests at once, since another worker can begin them."""
        self._inbox = inbox
        self._server = server
        self._probes = probes
        self._load = core.load_report()
        self._load_at = 0.0
        self._steps = 0
        self._turns = 0
        """Turns of the loop without a step, which count as progress while requests wait for peers'
        KV."""
        self._unflushed = False
        """Whether output waits to be flushed after the next launch."""
        self._idle = IdlePoll(core.config.scheduler.idle_poll_ms / 1000)
        self._drain = Drain()
        self._stall_watchdog = StallWatchdog()
        self._role = "worker" if card.role is None else card.role.value
        self._spans = spans
        self._watched = 0
        self._signals = 0
        self._peers = PeerSets()
        self._cache_snapshots = CacheSnapshots(core)
        self._linked: frozenset[Incarnation] = frozenset()
        """Linked peers in the last report to routers."""
        self._io = IOThread(
            endpoint=f"tcp://{server.host}:{server.port}",
            card=card,
            incarnation=card.incarnation,
            inbox=inbox,
            beat=self._beat,
            metrics=LinkMetrics(registry),
            guard=guard,
        )
        core.wake = lambda: inbox.put(None)
        core.sleep.keeps_awake = handoff.keeps_awake
        core.sleep.beside = handoff
        probes.attach(core=core, handoff=handoff, draining=lambda: self._drain.begun)

    @property
    def endpoint(self) -> str:
        return self._io.endpoint

    def run(self) -> int:
        """Run the step loop until ``stop`` or a signal; signals require the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
        self._io.start()
        self._stall_watchdog.start()
        nap_precisely()
        try:
            self._loop()
        except Exception:
            logger.exception("the step loop failed; the worker ends")
            self._probes.fail("the step loop failed")
            # The requests need another process.
            self._fail_at_routers(
                self._core.keys(), FailCause.WORKER_LOST, "the worker's engine failed"
            )
            return 1
        finally:
            self._stall_watchdog.stop()
            self._io.stop()
            self._handoff.close()
            self._core.close()
            if self._spans is not None:
                self._spans.close()  # last: it may wait for a collector
        return 0

    def _loop(self) -> None:
        progressed = True
        while not self._done():
            self._receive(block=not progressed)
            outputs = self._core.advance()
            progressed = outputs.progressed
            if progressed:
                self._io.leave()
                self._steps += 1
                self._probes.note_step()
            self._send(outputs)
            self._core.observe()
            self._refresh_load()

    def _receive(self, *, block: bool) -> None:
        if block and self._inbox.empty:
            seconds = self._cache_snapshots.seconds(time.monotonic())
            if self._core.has_work:  # KV is arriving, and its threads need the interpreter
                expected = self._handoff.expected()
                self._io.attend(*self._idle.expecting(expected, min(PARKED_SECONDS, seconds)))
            else:
                self._io.attend(min(IDLE_SECONDS, seconds), self._idle.begin())
        if not self._inbox.empty:
            self._idle.end()
        woken = False
        for item in self._inbox.take():
            if isinstance(item, FromRouter):
                self._handle(item)
            elif isinstance(item, RouterFound):
                first = self._cache_snapshots.begin(item.router, time.monotonic())
                self._io.send(item.router, Frame(step=self._steps, blocks=first))
                self._io.flush()
            elif isinstance(item, RouterLost):
                self._core.abort_router(item.router)
                self._peers.forget(item.router)
                self._cache_snapshots.forget(item.router)
            else:
                woken = True
        if woken:  # by the hand-off; several wakes count once
            self._look_at_links()

    def _look_at_links(self) -> None:
        linked = frozenset(each.peer for each in self._handoff.peer_health() if each.up)
        if linked != self._linked:
            self._linked = linked
            self._io.beat_soon()

    def _handle(self, item: FromRouter) -> None:
        message, router = item.message, item.router
        if isinstance(message, Submit):
            self._submit(router, message)
        elif isinstance(message, Cancel):
            key = RequestKey(router, message.request, message.attempt)
            if message.choices:
                self._core.end_choices(key, message.choices)
            else:
                self._core.abort(key)
        elif isinstance(message, PeerSet):
            self._handoff.set_peers(self._peers.add(router, message.controls))
        elif isinstance(message, Call):
            self._call(router, message.command)

    def _call(self, router: Incarnation, command: Command) -> None:
        if command.name is CommandName.DRAIN and "grace_ms" in command.args:
            self.stop(grace_before(float(command.args["grace_ms"]) / 1000))
        reply = self._core.call(command)
        self._load = self._core.load_report()  # a beat after the reply has the same load
        self._io.send(router, ReplyTo(reply))
        self._io.flush()

    def _submit(self, router: Incarnation, message: Submit) -> None:
        key = message.request.key
        if key.router != router:
            logger.warning("request %s came over the link of another router", key)
            return
        refusal = self._core.add(message.request)
        if refusal is None:
            if message.request.watch is not None:
                self._watched += 1
                self._stall_watchdog.watch()
            # Sent after the step's launch or with the next beat, so that it does not delay the
            # launch.
            accepted = (Accepted(key.request, key.attempt),)
            self._io.send(router, Frame(step=self._steps, accepted=accepted))
            self._unflushed = True
        else:
            refused = (Refused(key.request, key.attempt, refusal),)
            self._io.send(router, Frame(step=self._steps, refused=refused))
            self._io.flush()

    def _send(self, outputs: StepOutputs) -> None:
        sent, self._unflushed = self._unflushed, False
        times = self._times(outputs) if outputs.ended else {}
        for router, tokens, failed in outputs.by_router():
            leg_times = tuple(times.get(router, ()))
            for frame in step_frames(self._steps, tokens, failed, leg_times):
                self._io.send(router, frame)
            sent = True
        for of, refused in outputs.refused.items():
            self._io.send(Incarnation(of), Frame(step=self._steps, refused=tuple(refused)))
            sent = True
        for frame in block_frames(self._steps, outputs.blocks):
            self._io.send(None, frame)
            sent = True
        for to, part in self._cache_snapshots.parts(time.monotonic()):
            self._io.send(to, Frame(step=self._steps, blocks=part))
            sent = True
        if sent:
            self._io.flush()

    def _times(self, outputs: StepOutputs) -> dict[Incarnation, list[LegTimes]]:
        by_router: dict[Incarnation, list[LegTimes]] = {}
        now, stops = time.monotonic(), self._stall_watchdog.stops()
        self._watched -= len(outputs.ended)
        for book in outputs.ended:
            if self._spans is not None and is_sampled(book.watch.traceparent):
                self._spans.later(partial(write_spans, self._spans, self._role, book, now, stops))
            if logger.isEnabledFor(logging.DEBUG):
                about = {"request_id": book.watch.request_id, "trace_id": book.watch.trace_id}
                seconds = now - book.arrived
                logger.debug("%s ended after %.3f s: %s", book.key, seconds, book.why, extra=about)
            by_router.setdefault(Incarnation(book.key.router), []).append(book.times(now, stops))
        return by_router

    def _refresh_load(self) -> None:
        now = time.monotonic()
        if now - self._load_at >= LOAD_SECONDS:
            if self._watched:
                self._stall_watchdog.watch()
            self._load_at = now
            self._load = self._core.load_report()
            here = self._core.scheduler.make_stats()
            if not (here.running or here.waiting or here.gated):
                self._turns += 1
            self._handoff.note_progress(self._steps, self._core.has_work)

    def _beat(self) -> WorkerBeat:
        load = self._load
        report = structs.replace(
            load, leased_blocks=self._handoff.leased_blocks(), draining=self._drain.begun
        )
        progress = self._handoff.progress() + self._turns
        beat = Beat(self._steps, progress, load.num_running + load.num_waiting > 0)
        return WorkerBeat(beat, report, self._handoff.peer_health())

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        logger.info("signal %d", number)
        self.stop(self._server.drain_seconds if self._signals == 1 else 0.0)

    def stop(self, grace: float) -> None:
        """Refuse new requests, hand back those left after ``grace`` seconds, then end. Callable
        from any thread; the earliest requested end counts."""
        if not self._drain.begin(time.monotonic(), grace):
            return
        logger.info("draining for up to %g s", grace)
        self._core.drain()
        self._io.send(None, Draining(round(grace * 1000)))
        self._io.ring()  # a signal handler may have interrupted a flush
        self._inbox.put(None)

    def _done(self) -> bool:
        if not self._drain.begun:
            return False
        if self._returns_queue:
            self._give_back(self._core.waiting_keys(), "the worker drains before it began this")
        if not self._core.has_work:
            return True
        now = time.monotonic()
        if not self._drain.hands_back(now):
            return False
        self._give_back(self._core.keys(), "the worker is shutting down")
        return not self._core.has_work or self._drain.over(now)

    def _give_back(self, keys: list[RequestKey], reason: str) -> None:
        for key in keys:
            self._core.abort(key)
        self._fail_at_routers(keys, FailCause.DRAINING, reason)

    def _fail_at_routers(self, keys: list[RequestKey], cause: FailCause, reason: str) -> None:
        for key in keys:
            failed = Failed(key.request, key.attempt, cause, reason)
            self._io.send(Incarnation(key.router), Frame(step=self._steps, failed=(failed,)))
        if keys:
            self._io.flush()
