"""Grammars in another process, with limits and deadlines.

Answers' tokens are kept here: after the process has ended, the next one follows its other answers
again.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from weakref import finalize

import msgspec

from tandem.engine.executor.channel import Channel, ChannelClosed
from tandem.engine.structured.backends import format_enforcer, outlines, xgrammar
from tandem.engine.structured.errors import GrammarError, NoBackend, NotNow
from tandem.engine.structured.messages import DONE, ERROR, UNKNOWN, Compile, Follow, Setup, State
from tandem.protocol.structured import StructuredOutputsParams

MEMORY_BYTES = 2 << 30
LOAD_SECONDS = 60.0
"""Seconds for the process to start and to load a library and the vocabulary."""
COMPILE_SECONDS = 6.0
TURN_SECONDS = 3.0
"""Seconds to wait for other compiles; with the above less than the gate's limit."""
FOLLOW_SECONDS = 3.0
_STOP_SECONDS = 5.0
_ATTEMPTS = 3
"""Processes in which a mask is tried, as another answer may end one."""
PREPARED: dict[str, Callable[[StructuredOutputsParams], StructuredOutputsParams]] = {
    "outlines": outlines.prepared,
    "xgrammar": xgrammar.prepared,
    "lm-format-enforcer": format_enforcer.prepared,
}


class _Running:
    """One process."""

    def __init__(self, setup: Setup) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [there.fileno() for _, there in pairs]
        command = [sys.executable, "-P", "-m", "tandem.engine.structured.child"]
        self.process = subprocess.Popen(
            [*command, *map(str, theirs), msgspec.json.encode(setup).decode()],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        for _, there in pairs:
            there.close()
        self.compiling, self.following = (Channel(here) for here, _ in pairs)
        finalize(self, _close, self.compiling, self.following)  # no thread waits for them then
        self.loaded: set[str] = set()

    def end(self) -> int:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.1)  # if it has closed a channel, its own status says more
        self.process.kill()
        return self.process.wait(_STOP_SECONDS)


class GrammarProcess:
    """Process of one engine, started when needed, for any number of threads."""

    def __init__(self, folder: Path, vocab_size: int, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._setup = Setup(str(folder), vocab_size, memory_bytes)
        self._running: _Running | None = None
        self._closed = False
        self._changing = Lock()
        """Lock of the two above."""
        self._compiling, self._following = Lock(), Lock()
        """Held while a message on a channel is answered."""
        self.ended: deque[int] = deque()
        """Answers that the process may forget."""

    @property
    def pid(self) -> int | None:
        running = self._running
        return None if running is None else running.process.pid

    def load(self, backend: str) -> None:
        """Load a backend. Raises GrammarError."""
        with self._turn(self._compiling, 2 * LOAD_SECONDS):
            self._load(self._current(), backend)

    def compile(self, job: Compile) -> None:
        """Compile a form. Raises GrammarError; NotNow if another answer ended the process."""
        with self._turn(self._compiling, TURN_SECONDS):
            running = self._current()
            self._load(running, job.backend)
            answer = self._compiled(running, job, job.seconds)
        if answer[:1] == ERROR:
            raise GrammarError(answer[1:].decode())

    def follow(self, answer: Answer) -> State:
        """Return an answer's state after its last token. Raises GrammarError."""
        for _ in range(_ATTEMPTS):
            with self._turn(self._following, FOLLOW_SECONDS):
                running, found = self._current(), UNKNOWN
                if answer.job.backend in running.loaded:
                    try:
                        found = self._followed(running, answer)
                    except ChannelClosed:
                        self._end(running)
            if found[:1] == DONE:
                return msgspec.msgpack.decode(found[1:], type=State)
            if found[:1] == ERROR:
                raise GrammarError(found[1:].decode())
            self.compile(answer.job)
        raise NotNow("the process of grammars ended several times")

    def close(self) -> None:
        """End the process. May be called twice."""
        self._closed = True
        running = self._running
        if running is not None:
            running.end()

    def _followed(self, running: _Running, answer: Answer) -> bytes:
        new = answer.followed_by is not running
        tokens = answer.tokens if new else answer.tokens[answer.num_followed :]
        form = msgspec.msgpack.encode(answer.job) if new else b""
        ended = [self.ended.popleft() for _ in range(len(self.ended))]
        message = msgspec.msgpack.encode(Follow(answer.number, form, tokens, ended))
        try:
            found = _exchange(running.following, message, FOLLOW_SECONDS)
        except TimeoutError:
            self._end(running)
            raise GrammarError(f"a format that checks tokens within {FOLLOW_SECONDS:g} s") from None
        if found[:1] == DONE:
            answer.followed_by, answer.num_followed = running, len(answer.tokens)
        return found

    def _compiled(self, running: _Running, job: Compile, seconds: float) -> bytes:
        try:
            return _exchange(running.compiling, msgspec.msgpack.encode(job), seconds)
        except TimeoutError:
            self._end(running)
            raise GrammarError(f"a format that compiles within {seconds:g} s") from None
        except ChannelClosed:
            status = self._end(running)
        if status == -signal.SIGXCPU:
            raise GrammarError(f"a format that compiles within {seconds:g} s")
        if status == -signal.SIGABRT:
            most = self._setup.memory_bytes >> 20
            raise GrammarError(f"a format that compiles within {most:,} MiB of memory")
        raise NotNow(f"the process of grammars ended with status {status}")

    def _load(self, running: _Running, backend: str) -> None:
        if backend not in running.loaded:
            answer = self._compiled(running, Compile(backend, None, LOAD_SECONDS), LOAD_SECONDS)
            if answer[:1] == ERROR:
                raise NoBackend(answer[1:].decode())
            running.loaded.add(backend)

    def _current(self) -> _Running:
        with self._changing:
            if self._closed:
                raise NotNow("the engine is closed")
            if self._running is None:
                self._running = _Running(self._setup)
            return self._running

    def _end(self, running: _Running) -> int:
        with self._changing:
            if self._running is running:
                self._running = None
        return running.end()

    @contextmanager
    def _turn(self, lock: Lock, seconds: float) -> Iterator[None]:
        if not lock.acquire(timeout=seconds):
            raise NotNow(f"others took {seconds:g} s of the process of grammars")
        try:
            yield
        finally:
            lock.release()


def _close(*channels: Channel) -> None:
    for each in channels:
        each.close()


def _exchange(channel: Channel, message: bytes, seconds: float) -> bytes:
    until = time.monotonic() + seconds
    channel.send(message, seconds=seconds)
    return channel.receive(seconds=max(0.001, until - time.monotonic()))


class Answer:
    """Grammar whose masks come from the process; keeps the answer's tokens."""

    _numbers = itertools.count()

    def __init__(
        self,
        process: GrammarProcess,
        job: Compile,
        tokens: Sequence[int] = (),
        state: State | None = None,
    ) -> None:
        self.job = job
        self.tokens = list(tokens)
        self.number = next(self._numbers)
        self.followed_by: object = None
        """Process that has its first ``num_followed`` tokens."""
        self.num_followed = 0
        self._process = process
        self._state = state
        finalize(self, process.ended.append, self.number)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append tokens; the next ``fill`` checks one that no mask was made for."""
        for token in token_ids:
            if self._state is not None and not self._state.mask[token // 8] >> token % 8 & 1:
                raise GrammarError(f"another token than {token}, which is not allowed here")
            self.tokens.append(token)
            self._state = None

    def fill(self, words: memoryview) -> None:
        words[:] = self._known().mask

    @property
    def is_accepting(self) -> bool:
        return self._known().is_accepting

    @property
    def is_terminated(self) -> bool:
        return self._state is not None and not any(self._state.mask)

    def copy(self) -> Answer:
        return Answer(self._process, self.job, self.tokens, self._state)

    def _known(self) -> State:
        if self._state is None:
            self._state = self._process.follow(self)
        return self._state


class ProcessBackend:
    """GrammarBackend over a process, which other backends may share."""

    def __init__(self, name: str, process: GrammarProcess) -> None:
        """Load the library. Raises NoBackend."""
        self._name = name
        self._process = process
        process.load(name)

    def compile(self, wanted: StructuredOutputsParams, /) -> Answer:
        job = Compile(self._name, PREPARED[self._name](wanted), COMPILE_SECONDS)
        self._process.compile(job)
        return Answer(self._process, job)

    def close(self) -> None:
        self._process.close()
