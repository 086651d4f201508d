"""Link to one worker address: sends HELLO, and dispatches received frames.

A request's events go to its ``Sink``, the worker's own to the ``Listener``. A lost link sends every
key ``Failed(WORKER_LOST)``. Frames that do not match are counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tandem.link.liveness import Pulse
from tandem.link.session import (
    LinkState,
    Session,
    Terms,
    Verdict,
)
from tandem.link.sockets import Context, decode_to_router
from tandem.protocol.card import ModelCard, WorkerRole
from tandem.protocol.commands import Command, Reply
from tandem.protocol.errors import FailCause, RequestFailed
from tandem.protocol.ids import Incarnation
from tandem.protocol.keys import KeyRing
from tandem.protocol.messages import (
    Beat,
    Call,
    Cancel,
    Draining,
    Frame,
    LoadReport,
    PeerHealth,
    PeerSet,
    ReplyTo,
    Reset,
    Submit,
    ToRouter,
    ToWorker,
    Welcome,
    WorkerBeat,
    encode,
)
from tandem.protocol.outputs import (
    Accepted,
    BlockEvents,
    EngineOutput,
    Failed,
    Refused,
)
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import LegTimes
from tandem.router.workers.dealer import Dealer
from tandem.router.workers.rates import Window


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """Facts of a pod; the defaults are those of a listed address."""

    pod: str = ""
    role: str = ""
    revision: str = ""
    """Revision of the role's template."""
    admitted: bool = False
    """Whether the worker's revision may serve users."""
    leaving: bool = False
    """Whether the worker is about to end."""

    @property
    def template(self) -> tuple[str, str]:
        return (self.role, self.revision)


NO_NOTE = WorkerNote()

Admitted = frozenset[tuple[str, str]] | None
"""Templates that serve users; None is all, if no pod is marked."""


def admitted_templates(notes: Iterable[WorkerNote]) -> Admitted:
    """Return the admitted templates of all pods; None if none is marked."""
    return frozenset(note.template for note in notes if note.admitted) or None


LegEvent = EngineOutput | Accepted | Refused | Failed


class Sink(Protocol):
    """Receiver of one worker's events of one key; called in the loop, never blocks."""

    def receive(self, event: LegEvent) -> None: ...

    def timed(self, times: LegTimes) -> None:
        """Take the worker's times of the key."""
        ...


@dataclass(frozen=True, slots=True)
class LinkContext:
    """State that all connections of a router share."""

    zmq: Context
    terms: Terms
    dropped: Callable[[str], None]
    """Counts a dropped frame by reason."""
    curve: KeyRing | None = None


logger = logging.getLogger(__name__)

_HELLO_RETRY = 0.1
_HELLO_RETRY_MAX = 5.0
_BEAT = encode(Beat())


class Listener(Protocol):
    """Receiver of a worker's own events; called in the loop, never blocks."""

    def on_up(self, connection: WorkerConnection, card: ModelCard) -> None:
        """Note WELCOME: the link is up."""
        ...

    def on_refused(self, connection: WorkerConnection) -> None:
        """Note that the worker's protocol differs, or no longer does."""
        ...

    def on_lost(self, connection: WorkerConnection, incarnation: Incarnation, reason: str) -> None:
        """Note the link's end, once after ``on_up``; its keys have failed."""
        ...

    def on_beat(self, connection: WorkerConnection, beat: WorkerBeat) -> None: ...

    def on_blocks(self, connection: WorkerConnection, events: BlockEvents) -> None: ...

    def on_draining(self, connection: WorkerConnection, grace_ms: int) -> None:
        """Note that the worker will end within ``grace_ms``."""
        ...


class WorkerConnection:
    """Link to one address; the pool calls ``tick`` a few times a second."""

    def __init__(self, context: LinkContext, endpoint: str, listener: Listener) -> None:
        self.endpoint = endpoint
        self.incarnation: Incarnation | None = None
        """Incarnation of the worker while the link is up."""
        self.other_wire = ""
        """The worker's protocol if it differs."""
        self._context = context
        self._listener = listener
        self._session = Session(context.terms)
        self._pulse = Pulse(context.terms.times.beat_interval)
        self._sinks: dict[tuple[str, int], Sink] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._next_call = 0
        self._hello_delay = _HELLO_RETRY
        self._hello_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._dealer = Dealer(
            context.zmq,
            endpoint,
            received=self._on_frame,
            connected=self._greet,
            disconnected=self._on_disconnected,
            curve=context.curve,
        )

    @property
    def state(self) -> LinkState:
        return self._session.state

    @property
    def is_refused(self) -> bool:
        """Return whether the keys of the two ends do not match."""
        return self._dealer.is_refused

    def close(self) -> None:
        """Fail running requests and close the socket. May be called twice."""
        self._down("the router closed the link", expected=True)
        self._dealer.close()

    def submit(self, request: EngineCoreRequest, sink: Sink) -> bool:
        """Start a leg; its events go to ``sink`` until ``release``. False: the link is down."""
        if self.state is not LinkState.UP:
            return False
        key = (request.key.request, request.key.attempt)
        self._sinks[key] = sink
        if self._send(Submit(request)):
            return True
        del self._sinks[key]
        return False

    def release(self, request: str, attempt: int, *, cancel: bool) -> None:
        """Ignore further events of a key; ``cancel`` cancels it on the worker."""
        self._sinks.pop((request, attempt), None)
        if cancel and self.state is LinkState.UP:
            self._send(Cancel(request, attempt))

    def end_choices(self, request: str, attempt: int, choices: tuple[int, ...]) -> None:
        """Make the worker drop choices of a key."""
        if self.state is LinkState.UP:
            self._send(Cancel(request, attempt, choices))

    async def call(self, command: Command, timeout: float) -> Reply:
        """Run a command on the worker. Raises RequestFailed at the timeout."""
        number = self._next_call
        self._next_call += 1
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._calls[number] = future
        try:
            if self.state is not LinkState.UP or not self._send(
                Call(Command(id=number, name=command.name, args=command.args))
            ):
                raise RequestFailed(FailCause.WORKER_LOST, f"{self.endpoint} is not connected")
            async with asyncio.timeout(timeout):  # wait_for swallows late cancels (3.11)
                return await future
        except TimeoutError as error:
            raise RequestFailed(
                FailCause.TIMEOUT, f"{self.endpoint} did not answer {command.name} in {timeout:g} s"
            ) from error
        finally:
            del self._calls[number]

    def send_peers(self, controls: dict[str, Incarnation]) -> None:
        """Send a decode worker the prefill workers to link to."""
        if self.state is LinkState.UP:
            self._send(PeerSet(controls))

    def tick(self, late: float = 0.0) -> None:
        """Send due frames, and detect overdue ones. ``late``: seconds that the loop was blocked."""
        now = self._loop.time()
        self._session.alive.overslept(late)
        if self.state is LinkState.DOWN:
            return
        overdue = self._session.overdue(now)
        if overdue is not None:
            self._down(overdue)
            self._dealer.reopen()
        elif self.state is LinkState.UP and self._pulse.late(now) is not None:
            self._write(_BEAT)

    def park(self, why: str) -> None:
        """Close until ``reconnect``: a second link to a worker would end its first."""
        self._down(why, expected=True)
        self._dealer.close()

    def reconnect(self) -> None:
        """Start again with a new socket if the link is down, which resolves its name again."""
        if self.state is LinkState.DOWN:
            self._dealer.reopen()

    def _send(self, message: ToWorker) -> bool:
        return self._write(encode(message))

    def _write(self, payload: bytes) -> bool:
        sent = self._dealer.send(self._session.seal(), payload)
        if not sent and self.state is LinkState.UP:
            # The header was counted, so the worker would see a gap.
            self._loop.call_soon(self._after_failed_send, self.incarnation)
        return sent

    def _after_failed_send(self, incarnation: Incarnation | None) -> None:
        if self.state is LinkState.UP and self.incarnation == incarnation:
            self._down("nothing can be sent")
            self._dealer.reopen()

    def _greet(self) -> None:
        self._cancel_hello()
        self._down("greeted again")
        head = self._session.greet(self._loop.time())
        self._dealer.send(head, encode(self._context.terms.hello()))

    def _greet_later(self) -> None:
        if self._hello_timer is None:
            self._hello_timer = self._loop.call_later(self._hello_delay, self._greet)
            self._hello_delay = min(2 * self._hello_delay, _HELLO_RETRY_MAX)

    def _cancel_hello(self) -> None:
        """Cancel a pending HELLO: it must not end another link."""
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def _on_disconnected(self) -> None:
        self._down("the connection closed")

    def _down(self, reason: str, *, expected: bool = False) -> None:
        """Fail every key, notify the listener if the worker was up, and be DOWN."""
        incarnation, self.incarnation = self.incarnation, None
        self._session.end(reason)
        self._cancel_hello()
        sinks, self._sinks = self._sinks, {}
        message = f"worker {self.endpoint} lost: {reason}"
        for (request, attempt), sink in sinks.items():
            sink.receive(Failed(request, attempt, FailCause.WORKER_LOST, message))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(RequestFailed(FailCause.WORKER_LOST, message))
        if incarnation is not None:
            logger.log(logging.INFO if expected else logging.WARNING, "%s", message)
            self._listener.on_lost(self, incarnation, reason)

    def _on_frame(self, parts: list[bytes]) -> None:
        verdict, message = self._session.receive(parts, decode_to_router, self._loop.time())
        if verdict is not Verdict.DELIVER:
            self._on_verdict(verdict, message)
        elif type(message) is Frame:
            self._deliver(message)
        else:
            self._on_message(message)

    def _on_verdict(self, verdict: Verdict, message: ToRouter | None) -> None:
        session = self._session
        if verdict is Verdict.UP:
            assert isinstance(message, Welcome)
            self.incarnation = session.peer
            self.other_wire = ""
            self._hello_delay = _HELLO_RETRY
            self._cancel_hello()
            self._listener.on_up(self, message.card)
        elif verdict is Verdict.REFUSED:
            logger.info("worker %s refused HELLO: %s", self.endpoint, session.why)
            other = session.terms.is_other_version(session.why)
            if self.other_wire != (reason := session.why if other else ""):
                self.other_wire = reason
                self._listener.on_refused(self)
            self._greet_later()
        elif verdict is Verdict.GARBAGE:
            self._context.dropped("garbage")
        elif verdict is Verdict.STRAY:
            self._context.dropped("unexpected" if self.state is LinkState.UP else "stale")
        else:
            self._lost(verdict, message)

    def _lost(self, verdict: Verdict, message: ToRouter | None) -> None:
        why = self._session.why
        if not isinstance(message, Reset):
            self._context.dropped("reset")
        if verdict is Verdict.BROKEN:
            self._dealer.send(self._session.seal(), encode(Reset(why)))
        self._down(why)
        self._greet_later()

    def _on_message(self, message: ToRouter | None) -> None:
        if isinstance(message, WorkerBeat):
            self._session.alive.progress(self._loop.time(), message.beat)
            self._listener.on_beat(self, message)
        elif isinstance(message, ReplyTo):
            future = self._calls.get(message.reply.id)
            if future is None or future.done():
                self._context.dropped("stale")
            else:
                future.set_result(message.reply)
        elif isinstance(message, Draining):
            self._listener.on_draining(self, message.grace_ms)

    def _deliver(self, frame: Frame) -> None:
        sinks = self._sinks
        for times in frame.times:  # before the last messages
            sink = sinks.get((times.request, times.attempt))
            if sink is not None:
                sink.timed(times)
        for event in frame.accepted:
            self._hand(sinks, event)
        for output in frame.outputs:
            sink = sinks.get((output.request, output.attempt))
            if sink is not None:
                sink.receive(output)
            else:
                self._context.dropped("stale")
        for refused in frame.refused:
            self._hand(sinks, refused)
        for failed in frame.failed:
            self._hand(sinks, failed)
        if frame.blocks is not None:
            self._listener.on_blocks(self, frame.blocks)

    def _hand(self, sinks: dict[tuple[str, int], Sink], event: Accepted | Refused | Failed) -> None:
        sink = sinks.get((event.request, event.attempt))
        if sink is not None:
            sink.receive(event)
        else:
            self._context.dropped("stale")


@dataclass(slots=True, eq=False)
class Worker:
    """A connected worker: its card, load and this router's legs."""

    incarnation: Incarnation
    card: ModelCard
    connection: WorkerConnection
    role: WorkerRole
    fingerprint: str
    """Digest for hashes of prompts' blocks."""
    compatibility: str
    """Digest of workers with compatible KV."""
    load: LoadReport | None = None
    peers: dict[Incarnation, PeerHealth] = field(default_factory=dict)
    """Links to workers that hand over or lend to it, as last reported."""
    draining: bool = False
    note: WorkerNote = NO_NOTE
    """Facts from discovery."""
    num_legs: int = 0
    """Running legs of this router."""
    leg_tokens: int = 0
    """Prompt tokens of legs without output."""
    leg_compute_tokens: int = 0
    """Part of ``leg_tokens`` that the worker computes itself."""
    leg_prompts: int = 0
    leg_whole_tokens: int = 0
    """``leg_tokens`` with nothing cached, as a worker counts its waiting tokens."""
    leg_whole_compute_tokens: int = 0
    """Part of ``leg_whole_tokens`` that the worker computes itself."""
    num_streams: int = 0
    """Legs with output that continue."""
    reported: tuple[int, int] = (0, 0)
    """``leg_whole_tokens`` and ``leg_whole_compute_tokens`` at the last report.

    Tokens beyond them are of other routers.
    """
    peers_sent: dict[str, Incarnation] | None = None
    received_at: float = 0.0
    """Time of its last beat."""
    throughput: Window = field(default_factory=Window)
    """Rates of its steps, prompt tokens and sampled tokens."""
    token_bytes: float = field(init=False)
    """Bytes of KV per token."""
    blocks_per_span: int = field(init=False)
    """Blocks of ``block_size`` more tokens of a long prompt."""

    def __post_init__(self) -> None:
        layout = self.card.fingerprint.layout
        self.token_bytes = layout.token_bytes
        self.blocks_per_span = len(layout.growing)

    @property
    def takes_new(self) -> bool:
        return not (self.draining or self.note.leaving)

    @property
    def sleeps(self) -> bool:
        """Return whether the worker sleeps, as last reported."""
        return self.load is not None and self.load.sleeping

    @property
    def name(self) -> str:
        """Return role, address and first digits of the incarnation, for logs."""
        return f"{self.role} {self.connection.endpoint} {self.incarnation.hex()[:8]}"
