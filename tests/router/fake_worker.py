"""A small worker that really speaks the protocol over ZMQ, with behaviours that tests script.

Its "model" answers every prompt with a fixed list of tokens, by position, so that a second attempt
goes on where the first one stopped. A behaviour is a generator: it says things through its ``Turn``
and yields the seconds to wait before its next step.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq
from msgspec import structs
from tests.hand_link import HandLink
from tests.router.fake_cards import fake_card

from tandem.link.sockets import decode_to_worker
from tandem.protocol.card import WorkerRole
from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.errors import FailCause, Refusal
from tandem.protocol.ids import Incarnation, new_incarnation
from tandem.protocol.link import read_header
from tandem.protocol.messages import (
    Beat,
    Call,
    Cancel,
    Frame,
    Hello,
    LoadReport,
    PeerHealth,
    PeerSet,
    ReplyTo,
    Reset,
    Submit,
    ToRouter,
    Welcome,
    WorkerBeat,
    encode,
)
from tandem.protocol.outputs import (
    Accepted,
    BlockEvents,
    EngineCoreOutput,
    Failed,
    PooledOutput,
    Refused,
    TokenLogprobs,
    finish_of,
)
from tandem.protocol.pooling import ModelPooling, PoolingTask
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce

_IDLE = LoadReport(
    num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=1000, total_blocks=1000
)


class Turn:
    def __init__(self, worker: FakeWorker, router: Incarnation, request: EngineCoreRequest) -> None:
        self.worker = worker
        self.router = router
        self.request = request
        self.key = (request.key.request, request.key.attempt)

    def say(self, **frame: object) -> None:
        self.worker.send(self.router, Frame(step=1, **frame))  # type: ignore[arg-type]

    def accept(self) -> None:
        self.say(accepted=(Accepted(*self.key),))

    def refuse(self, refusal: Refusal) -> None:
        self.say(refused=(Refused(*self.key, refusal),))

    def fail(self, cause: FailCause) -> None:
        self.say(failed=(Failed(*self.key, cause, "scripted"),))

    def token(self, position: int, *, choice: int = 0, token: int | None = None) -> bool:
        """The answer's token at ``position`` (or another); whether it ends the choice."""
        request = self.request
        chosen = self.worker.token_at(position, choice) if token is None else token
        end = finish_of(
            request.params,
            request.eos_token_ids,
            chosen,
            num_emitted=position + 1,
            num_prompt=len(request.prompt_token_ids),
            max_model_len=request.max_model_len or self.worker.max_model_len,
        )
        first = position == len(request.emitted_of(choice))
        self.say(outputs=(self._output(position, choice, chosen, end, first),))
        return end is not None

    def vector(self) -> None:
        """The whole answer to a request that is pooled: see ``FakeWorker.values_of``."""
        request, worker = self.request, self.worker
        values = array("f", worker.values_of(request)).tobytes()
        count = len(request.prompt_token_ids)
        self.say(outputs=(PooledOutput(*self.key, values, count, worker.num_cached),))

    def _output(
        self, position: int, choice: int, token: int, end: object, first: bool
    ) -> EngineCoreOutput:
        request = self.request
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = (_logprobs(token, request.params.logprobs),)
        prompt_logprobs = None
        if first and choice == 0 and request.params.prompt_logprobs is not None:
            count = request.params.prompt_logprobs
            ids = request.prompt_token_ids
            prompt_logprobs = (None, *(_logprobs(each, count) for each in ids[1:]))
        return EngineCoreOutput(
            *self.key,
            choice,
            position,
            (token,),
            finish=getattr(end, "reason", None),
            stop_token=getattr(end, "stop_token", None),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.worker.num_cached if first else None,
        )


def _logprobs(token: int, count: int) -> TokenLogprobs:
    others = tuple(range(token, token + count))
    return TokenLogprobs(token, -0.5, 1, others, tuple(-0.5 - n for n in range(count)))


Behaviour = Callable[[Turn], Iterator[float]]


def serve_well(turn: Turn) -> Iterator[float]:
    request, worker = turn.request, turn.worker
    turn.accept()
    if request.pooling is not None:
        yield worker.step
        turn.vector()
        return
    choices = [c for c in range(request.params.n) if c not in request.finished_choices]
    if isinstance(request.kv, Produce):
        yield worker.step
        for choice in choices:
            turn.token(len(request.emitted_of(choice)), choice=choice)
        return
    if isinstance(request.kv, Consume):
        yield worker.step  # token 1 comes from the prefill worker first
    at = {choice: len(request.emitted_of(choice)) for choice in choices}
    while at:
        yield worker.step
        for choice in list(at):
            if turn.token(at[choice], choice=choice):
                del at[choice]
            else:
                at[choice] += 1


@dataclass
class _Router:
    identity: bytes
    link: HandLink


@dataclass
class FakeWorker:
    """Runs in a thread from ``start`` to ``stop``."""

    role: WorkerRole
    port: int = 0
    revision: str = "r1"
    behaviour: Behaviour = serve_well
    answer: list[int] = field(default_factory=lambda: list(range(100, 140)))
    end: int = 0  # what the model says after the answer
    step: float = 0.002
    """Seconds between two tokens."""
    num_cached: int = 0
    links_up: bool = True
    """Whether a decode worker calls its links to the prefill workers it was told of up."""
    vocab_size: int = 50_000
    max_model_len: int = 2048
    max_handoff_tokens: int | None = None
    max_logprobs: int = 20
    pooling: ModelPooling | None = field(default_factory=ModelPooling)
    prompt_embeds: int | None = None  # see fake_card
    pull_peers: int = 0
    beat_seconds: float = 0.05
    has_work: bool = False
    block_size: int = 16
    load: LoadReport = _IDLE
    insomnia: str = ""  # why it never sleeps
    curve_secret: bytes | None = None

    def __post_init__(self) -> None:
        self.incarnation = new_incarnation()
        self.submitted: list[EngineCoreRequest] = []
        self.cancelled: list[tuple[str, int]] = []
        self.ended: list[Cancel] = []
        self.peers: dict[str, Incarnation] = {}
        self.bytes_per_s, self.waiting_bytes, self.probed_bytes_per_s = 0.0, 0, 0.0
        self.resets: list[str] = []
        self.num_greeted, self.silent = 0, False
        self.refusal = ""
        """What it answers to each HELLO in place of a WELCOME."""
        self._routers: dict[bytes, _Router] = {}
        self._turns: list[tuple[float, Turn, Iterator[float]]] = []
        self.commands: list[Command] = []
        self._todo: deque[Callable[[], None]] = deque()
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self.curve_secret is not None:
            self._socket.curve_secretkey, self._socket.curve_server = self.curve_secret, True
        self._socket.bind(f"tcp://127.0.0.1:{self.port or '*'}")
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.card = fake_card(
            self.role,
            self.incarnation,
            revision=self.revision,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_handoff_tokens=self.max_handoff_tokens,
            max_logprobs=self.max_logprobs,
            pooling=self.pooling,
            prompt_embeds=self.prompt_embeds,
            block_size=self.block_size,
            port=self.port,
            pull_peers=self.pull_peers,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def token_at(self, position: int, choice: int) -> int:
        """The model: the answer (each choice has its own), then ``end`` for ever."""
        return self.answer[position] + choice if position < len(self.answer) else self.end

    def values_of(self, request: EngineCoreRequest) -> list[float]:
        """The model: four values of the prompt, for each token or label as the task says."""
        pooling, ids = request.pooling, request.prompt_token_ids
        assert pooling is not None
        if pooling.task is PoolingTask.CLASSIFY:
            assert self.pooling is not None
            return [(sum(ids) + n) % 7 / 8 for n in range(len(self.pooling.labels))]
        angle = float(sum(ids))
        vector = [math.cos(angle) * 0.6, math.sin(angle) * 0.6, 0.8, 0.0][: pooling.dimensions]
        return vector * (len(ids) if pooling.task is PoolingTask.TOKEN_EMBED else 1)

    def stop(self) -> None:
        """End as a killed process does: sockets closed, nothing said."""
        self._stop.set()
        self._thread.join(5)

    def do(self, action: Callable[[], None]) -> None:
        """Run something on the worker's thread soon."""
        self._todo.append(action)

    def send_raw(self, parts: list[bytes]) -> None:
        """Send bytes that no worker would, to every router."""

        def write() -> None:
            for router in self._routers.values():
                self._write(router.identity, parts)

        self.do(write)

    def send_sealed(self, payload: bytes) -> None:
        """Send any payload in a frame that is right otherwise."""

        def write() -> None:
            for router in self._routers.values():
                self._write(router.identity, [router.link.seal(), payload])

        self.do(write)

    def send_now(self, message: ToRouter) -> None:

        def send() -> None:
            for router in list(self._routers.values()):
                self.send(router.link.peer, message)

        self.do(send)

    def skip_sequence(self) -> None:
        """Lose a frame: the next one has a gap before it."""

        def lose() -> None:
            for router in self._routers.values():
                router.link.seal()

        self.do(lose)

    def tell_blocks(self, events: BlockEvents) -> None:
        self.send_now(Frame(step=1, blocks=events))

    def send(self, router: Incarnation, message: ToRouter) -> None:
        """On the worker's thread: one message for one router."""
        for known in self._routers.values():
            if known.link.peer == router:
                self._write(known.identity, [known.link.seal(), encode(message)])

    def _write(self, identity: bytes, parts: list[bytes]) -> None:
        if not self.silent:
            self._socket.send_multipart([identity, *parts])

    def _run(self) -> None:
        next_beat = 0.0
        while not self._stop.is_set():
            if self._socket.poll(1):
                parts = self._socket.recv_multipart()
                if not self.silent:
                    self._receive(parts)
            while self._todo:
                self._todo.popleft()()
            now = time.monotonic()
            self._advance(now)
            if now >= next_beat:
                next_beat = now + self.beat_seconds
                self._beat()
        self._socket.close(0)
        self._context.term()

    def _reply_to(self, command: Command) -> Reply:
        if command.name is CommandName.SLEEP and self.insomnia:
            return Reply(id=command.id, ok=False, message=self.insomnia)
        if command.name in (CommandName.SLEEP, CommandName.WAKE_UP):
            self.load = structs.replace(self.load, sleeping=command.name is CommandName.SLEEP)
        values = {"num_running": 1.0, "engines": 1.0, "asleep": float(self.load.sleeping)}
        return Reply(id=command.id, ok=True, values=values)

    def _advance(self, now: float) -> None:
        for entry in list(self._turns):
            due, turn, steps = entry
            if due > now or entry not in self._turns:
                continue
            self._turns.remove(entry)
            wait = next(steps, None)
            if wait is not None:
                self._turns.append((now + wait, turn, steps))

    def _beat(self) -> None:
        up, mover = self.links_up, "tcp" if self.links_up else ""
        throughput = (self.bytes_per_s, self.waiting_bytes, self.probed_bytes_per_s)
        peers = tuple(PeerHealth(peer, up, "", mover, *throughput) for peer in self.peers.values())
        self.send_now(WorkerBeat(Beat(has_work=self.has_work), self.load, peers))

    def _receive(self, parts: list[bytes]) -> None:
        identity, head, payload = parts
        header, message = read_header(head), decode_to_worker(payload)
        router = self._routers.get(identity)
        if isinstance(message, Hello) and self.refusal:
            link = HandLink(self.incarnation, header.source)
            self._write(identity, [link.seal(), encode(Reset(self.refusal))])
            return
        if isinstance(message, Hello):
            router = self._routers[identity] = _Router(identity, HandLink(self.incarnation))
        if router is None or not router.link.accept(header):
            link = HandLink(self.incarnation, header.source)
            self._write(identity, [link.seal(), encode(Reset("unknown"))])
            self._routers.pop(identity, None)
            return
        self._obey(router.link.peer, message)

    def _obey(self, router: Incarnation, message: object) -> None:
        if isinstance(message, Hello):
            self.num_greeted += 1
            self.send(router, Welcome(self.card))
        elif isinstance(message, Submit):
            self.submitted.append(message.request)
            turn = Turn(self, router, message.request)
            self._turns.append((0.0, turn, self.behaviour(turn)))
        elif isinstance(message, Cancel) and message.choices:
            self.ended.append(message)
        elif isinstance(message, Cancel):
            key = (message.request, message.attempt)
            self.cancelled.append(key)
            self._turns = [entry for entry in self._turns if entry[1].key != key]
        elif isinstance(message, PeerSet):
            self.peers = message.controls
            self._beat()
        elif isinstance(message, Call):
            self.commands.append(message.command)
            self.send(router, ReplyTo(self._reply_to(message.command)))
        elif isinstance(message, Reset):
            self.resets.append(message.reason)
            self._routers = {i: r for i, r in self._routers.items() if r.link.peer != router}
