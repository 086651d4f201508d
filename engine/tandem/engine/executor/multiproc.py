"""Executor of one rank in a child process; plans and results are sent over a channel.

The engine's threads and garbage do not delay a step. Each process sees the other's end at once. On
a CPU both map the KV cache, so that hand-offs move blocks from here.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from tandem.engine.config import EngineConfig
from tandem.engine.executor.channel import Channel, ChannelClosed
from tandem.engine.executor.wire import (
    Failed,
    FromRank,
    MemoryMoved,
    MoveMemory,
    Profile,
    Profiled,
    RankError,
    Start,
    Started,
    StepResult,
    decode_from_rank,
    encode,
    error_of,
)
from tandem.engine.kv_memory import Capacity, KVCacheAllocator, KVRegion
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from tandem.memory.shared import SharedMemory
from tandem.protocol.commands import MEMORY_SECONDS, PROFILE_SECONDS, SleepTag
from tandem.protocol.errors import InvalidParameter, TandemError

logger = logging.getLogger(__name__)

START_SECONDS = 3600.0
"""Time to load the weights."""
STEP_SECONDS = 600.0
"""Time for a rank to take a plan, or answer it, before it counts as hung."""
STOP_SECONDS = 15.0
"""Time after which a rank that has not ended is killed."""
_RANK = 0


class RankSilent(RankError):
    """The rank did not answer by the deadline; it may still."""


class RankFuture(Future[ModelRunnerOutput]):
    """Result of a step, received in the thread that calls ``result``."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Receive results up to this step's. Raises RankError."""
        while not self.done():
            self._executor.take_result(STEP_SECONDS if timeout is None else timeout)
        return super().result()


class MultiprocExecutor:
    """Executor of one rank in a child process, for one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._capacity: Capacity | None = None
        self._memory: SharedMemory | None = None
        self._pending: deque[RankFuture] = deque()
        """Steps without a result, in order."""
        self._late: MoveMemory | None = None
        """Request whose answer is late; it must be read before any other answer."""
        self._overslept = False
        """Whether the rank fell asleep after the deadline, so that it must be woken."""
        self._late_profiles = 0
        """Late answers to Profile, which are dropped."""

    def start(self, config: EngineConfig, allocate: KVCacheAllocator | None = None) -> Capacity:
        """Start the child. Raises InvalidParameter for an allocator: the memory is the child's."""
        assert self._process is None, "the executor has started already"
        if allocate is not None:
            allowed = "uni if the engine's process allocates the KV cache's memory"
            raise InvalidParameter("distributed_executor_backend", "mp", allowed)
        here, there = socket.socketpair()
        with there:
            self._process = self.launch(there.fileno())
        self._channel = Channel(here)
        try:
            self._capacity = self._begin(config)
        except BaseException:
            self.stop()
            raise
        logger.info("rank %d runs in process %d", _RANK, self._process.pid)
        return self._capacity

    def launch(self, descriptor: int) -> subprocess.Popen[bytes]:
        """Start the rank's process, which has its own end of the channel under ``descriptor``."""
        command = [sys.executable, "-P", "-m", "tandem.engine.executor.rank", str(descriptor)]
        return subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future = RankFuture(self)
        try:
            self._settle_memory()
            self._open.send(encode(plan), seconds=STEP_SECONDS)
        except ChannelClosed:
            future.set_exception(self._gone())
        except TandemError as error:
            future.set_exception(error)
        else:
            self._pending.append(future)
        return future

    def draw(self, masks: TokenMasks) -> None:
        with suppress(ChannelClosed):
            self._open.send(encode(masks), seconds=STEP_SECONDS)

    def regions(self) -> tuple[KVRegion, ...]:
        """Raise InvalidParameter on a GPU: the child's memory is unreachable."""
        assert self._capacity is not None, "the executor has not started, or has stopped"
        if self._memory is None:
            raise unreachable()
        size = self._capacity.layout.block_bytes
        blocks = self._memory.tensor()[: self._capacity.num_blocks * size].view(-1, size)
        return (KVRegion(_RANK, blocks),)

    def sleep(self, level: int) -> int:
        return self._move_memory(MoveMemory(level=level))

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        self._move_memory(MoveMemory(tags=tuple(tags)))

    def profile(self, folder: str | None) -> str:
        try:
            self._open.send(encode(Profile(folder)), seconds=STEP_SECONDS)
        except ChannelClosed as error:
            raise self._gone() from error
        try:
            while not isinstance(message := self._receive(PROFILE_SECONDS), Profiled):
                self._take(message)  # a step that ended meanwhile
        except RankSilent:
            self._late_profiles += 1
            raise
        if message.error is not None:
            raise RankError(f"rank {_RANK}: {message.error}")
        return message.path

    def processes(self) -> Mapping[int, int]:
        return {} if self._process is None else {_RANK: self._process.pid}

    def check_health(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise self._gone()

    def stop(self) -> None:
        """Close the channel, at which the child ends; kill one that does not."""
        process, channel, memory = self._process, self._channel, self._memory
        self._process = self._channel = self._memory = self._capacity = None
        self._pending.clear()
        if channel is not None:
            channel.close()
        if memory is not None:
            memory.close()
        if process is not None:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("rank %d did not end within %g s", _RANK, STOP_SECONDS)
                process.kill()
                process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the executor has not started, or has stopped"
        return self._process.pid

    def take_result(self, seconds: float) -> None:
        """Set the result of the oldest step. Raises RankError if the rank ended, or is silent."""
        self._take(self._receive(seconds))

    def _take(self, message: FromRank) -> None:
        future = self._pending.popleft()
        if isinstance(message, StepResult):
            future.set_result(message.output())
        elif not isinstance(message, Failed):
            raise RankError(f"rank {_RANK} answered a step with a {type(message).__name__}")
        else:
            future.set_exception(error_of(message, _RANK))

    def _move_memory(self, asked: MoveMemory) -> int:
        assert not self._pending, "memory is moved between steps"
        self._settle_memory()
        return self._ask_memory(asked)

    def _settle_memory(self) -> None:
        """Read a late answer, and wake a rank that fell asleep too late. May be called again after
        an error."""
        if self._late is not None:
            if isinstance(self._receive(MEMORY_SECONDS), MemoryMoved):
                self._overslept = self._late.level > 0
            self._late = None
        if self._overslept:
            self._ask_memory(MoveMemory(tags=tuple(SleepTag)))
            self._overslept = False

    def _ask_memory(self, asked: MoveMemory) -> int:
        try:
            self._open.send(encode(asked), seconds=STEP_SECONDS)
        except ChannelClosed as error:
            raise self._gone() from error
        try:
            message = self._receive(MEMORY_SECONDS)
        except RankSilent:
            self._late = asked
            raise
        if isinstance(message, Failed):
            raise error_of(message, _RANK)
        if not isinstance(message, MemoryMoved):
            raise RankError(f"rank {_RANK} answered with a {type(message).__name__}")
        return message.nbytes

    def _begin(self, config: EngineConfig) -> Capacity:
        level = logging.getLogger().getEffectiveLevel()
        try:
            self._open.send(encode(Start(config, level)), seconds=STEP_SECONDS)
        except ChannelClosed as error:
            raise self._gone() from error
        message = self._receive(START_SECONDS)
        if not isinstance(message, Started):
            if not isinstance(message, Failed):
                raise RankError(f"rank {_RANK} did not start: {type(message).__name__}")
            raise error_of(message, _RANK)
        if message.kv_cache_bytes:
            descriptor = self._open.receive_descriptor(seconds=STEP_SECONDS)
            self._memory = SharedMemory(descriptor, message.kv_cache_bytes)
        return message.capacity

    def _receive(self, seconds: float) -> FromRank:
        try:
            message = decode_from_rank(self._open.receive(seconds=seconds))
            while self._late_profiles and isinstance(message, Profiled):
                self._late_profiles -= 1
                message = decode_from_rank(self._open.receive(seconds=seconds))
            return message
        except ChannelClosed as error:
            raise self._gone() from error
        except TimeoutError as error:
            raise RankSilent(f"rank {_RANK} did not answer within {seconds:g} s") from error

    def _gone(self) -> RankError:
        process = self._process
        assert process is not None, "the executor has not started, or has stopped"
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return RankError(f"rank {_RANK} closed its channel, but its process still runs")
        if status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        else:
            how = f"ended with status {status}"
        return RankError(f"rank {_RANK} has ended: its process {process.pid} {how}")

    @property
    def _open(self) -> Channel:
        assert self._channel is not None, "the executor has not started, or has stopped"
        return self._channel


def unreachable() -> InvalidParameter:
    """Return the error that a rank's memory on a GPU is unreachable from another process."""
    allowed = "uni for a hand-off on a GPU: memory there is not shared between processes yet"
    return InvalidParameter("distributed_executor_backend", "mp", allowed)
