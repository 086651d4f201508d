"""One rank in a child process, as the engine's process sees it: its channel, messages and end."""

from __future__ import annotations

import signal
import subprocess
from collections import deque
from contextlib import suppress
from typing import Protocol

from tandem.engine.executor.channel import Channel, ChannelClosed
from tandem.engine.executor.wire import (
    Failed,
    FromRank,
    MemoryMoved,
    MoveMemory,
    Profiled,
    RankError,
    Started,
    StepResult,
    ToRank,
    decode_from_rank,
    encode,
)
from tandem.engine.kv_memory import Capacity
from tandem.memory.shared import SharedMemory

STEP_SECONDS = 600.0
"""Time for a rank to take a plan, or answer it, before it counts as hung."""
STOP_SECONDS = 15.0
"""Time after which a rank that has not ended is killed."""


class RankSilent(RankError):
    """The rank did not answer by the deadline; it may still."""


class Process(Protocol):
    """A rank's process, as ``subprocess.Popen`` shows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once the process has ended. Raises TimeoutExpired."""
        ...

    def kill(self) -> None: ...


class RankProcess:
    """Rank ``number`` in ``process``, for one thread."""

    def __init__(self, number: int, process: Process, channel: Channel) -> None:
        self.number = number
        self.process = process
        self.channel = channel
        self.memory: SharedMemory | None = None
        """The rank's KV cache; None if it cannot be shared."""
        self.results: deque[StepResult | Failed] = deque()
        """Results of steps that have been received and not taken."""
        self.late: MoveMemory | None = None
        """Request whose answer is late; it must be read before any other answer."""
        self.overslept = False
        """Whether the rank fell asleep although the engine is awake, so that it must be woken."""
        self._late_profiles = 0
        """Late answers to Profile, which are dropped."""

    def send(self, message: ToRank) -> None:
        """Send a message. Raises RankError if the rank has ended."""
        try:
            self.channel.send(encode(message), seconds=STEP_SECONDS)
        except ChannelClosed as error:
            raise self.gone() from error

    def started(self, seconds: float) -> Capacity | Failed:
        """Return the rank's capacity, after which its memory is known, or its error. Raises
        RankError."""
        message = self._receive(seconds)
        if isinstance(message, Started) and message.kv_cache_bytes:
            descriptor = self.channel.receive_descriptor(seconds=STEP_SECONDS)
            self.memory = SharedMemory(descriptor, message.kv_cache_bytes)
        if isinstance(message, Started):
            return message.capacity
        if isinstance(message, Failed):
            return message
        raise self._unexpected(message)

    def receive_result(self, seconds: float) -> StepResult | Failed:
        """Receive, keep and return the next result of a step. Raises RankError."""
        return self._keep(self._receive(seconds))

    def memory_moved(self, asked: MoveMemory, seconds: float) -> MemoryMoved | Failed:
        """Return the answer to ``asked``. Raises RankSilent, after which the answer is late, or
        RankError."""
        try:
            message = self._receive(seconds)
        except RankSilent:
            self.late = asked
            raise
        if isinstance(message, MemoryMoved | Failed):
            return message
        raise self._unexpected(message)

    def profiled(self, seconds: float) -> Profiled:
        """Return the answer to Profile; results of steps that come before it are kept. Raises
        RankSilent, after which the answer is dropped, or RankError."""
        try:
            while not isinstance(message := self._receive(seconds), Profiled):
                self._keep(message)
        except RankSilent:
            self._late_profiles += 1
            raise
        return message

    def stop(self) -> None:
        """Close the channel, at which the process ends."""
        self.channel.close()
        if self.memory is not None:
            self.memory.close()

    def ended(self, seconds: float) -> bool:
        """Wait for the process, and kill one that has not ended. Return whether it ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        self.process.kill()
        self.process.wait()
        return False

    def gone(self) -> RankError:
        """Return the error that the rank has ended."""
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return RankError(f"rank {self.number} closed its channel, but its process still runs")
        if status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        else:
            how = f"ended with status {status}"
        return RankError(f"rank {self.number} has ended: its process {self.process.pid} {how}")

    def silent(self, seconds: float) -> RankSilent:
        """Return the error that the rank did not answer."""
        return RankSilent(f"rank {self.number} did not answer within {seconds:g} s")

    def _keep(self, message: FromRank) -> StepResult | Failed:
        if not isinstance(message, StepResult | Failed):
            raise self._unexpected(message)
        self.results.append(message)
        return message

    def _unexpected(self, message: FromRank) -> RankError:
        return RankError(f"rank {self.number} answered with a {type(message).__name__}")

    def _receive(self, seconds: float) -> FromRank:
        try:
            message = decode_from_rank(self.channel.receive(seconds=seconds))
            while self._late_profiles and isinstance(message, Profiled):
                self._late_profiles -= 1
                message = decode_from_rank(self.channel.receive(seconds=seconds))
            return message
        except ChannelClosed as error:
            raise self.gone() from error
        except TimeoutError as error:
            raise self.silent(seconds) from error
