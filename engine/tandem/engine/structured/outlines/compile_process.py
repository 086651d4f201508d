"""A process that compiles one text at a time, and is killed when it takes too long.

It is started before it is needed, since a process takes a moment to begin, and anew after it was
killed or ended: its end is an error of the text that it had in hand, and of no other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from threading import Lock

import msgspec

from tandem.engine.executor.channel import Channel, ChannelClosed
from tandem.engine.structured.grammar import GrammarError, NotNow, Waits, untold
from tandem.engine.structured.outlines.jobs import Job, Limits
from tandem.engine.structured.outlines.tables import MAX_BYTES, TableError, Tables, unpack

MEMORY_BYTES = 2 << 30
"""Addresses of the process, its libraries among them."""
START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_MODULE = "tandem.engine.structured.outlines.child"
_LEAVE_OUT = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Set to 1 in the process: numpy reserves addresses for each thread that it might use."""


class OvertimeError(GrammarError):
    """A text that takes longer than it was given."""


class LostError(NotNow):
    """The process ended with a text in hand."""


class CompileProcess:
    """Any number of threads, one after the other."""

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._limits = Limits(memory_bytes)
        self._turn = Lock()
        """Held by the thread whose text is compiled."""
        self._state = Lock()
        """Of the three that follow."""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._closed = False
        self._is_ready = False
        """Whether the process has said that it is; the turn's."""
        self._has_begun = False
        """Whether the first process was waited for, whatever became of it."""
        self.is_beginning = False
        """Whether a text waits for the first process: no later one is waited for as long."""

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Have a process begin, unless there is one; nobody waits for it."""
        with self._state:
            if self._closed or self._process is not None:
                return
            here, there = socket.socketpair()
            with there:
                command = [sys.executable, "-P", "-m", _MODULE, str(there.fileno())]
                self._process = subprocess.Popen(
                    [*command, msgspec.json.encode(self._limits).decode()],
                    pass_fds=(there.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | dict.fromkeys(_LEAVE_OUT, "1"),
                )
            self._channel = Channel(here)
            self._is_ready = False

    def compile(self, job: Job, seconds: float, waits: Waits = untold) -> Tables:
        """The table of a job that is given ``seconds``; whoever is before it is waited for, which
        ``waits`` is told. Raises GrammarError: OvertimeError and LostError, after which there is
        another process."""
        waits(True)
        with self._turn:
            waits(False)
            self.start()
            channel = self._channel
            if channel is None:
                raise NotNow("the engine is closed")
            try:
                self._await_ready(channel)
                given = time.monotonic() + seconds
                job = msgspec.structs.replace(job, seconds=seconds)
                channel.send(msgspec.json.encode(job), seconds=seconds)
                left = max(0.001, given - time.monotonic())
                answer = channel.receive(seconds=left, most=MAX_BYTES + 1)
            except TimeoutError:
                self._end()
                self.start()
                raise OvertimeError(f"what compiles within {seconds:g} s") from None
            except ChannelClosed:
                raise self._lost(seconds) from None
        if answer[:1] != b"T":
            raise GrammarError(answer[1:400].decode(errors="replace"))
        try:
            return unpack(answer[1:])
        except TableError as error:
            raise GrammarError(f"what compiles to a table: {error}") from error

    def close(self) -> None:
        """End the process, whatever it does. May be called twice."""
        with self._state:
            self._closed = True
        self._end()

    def _await_ready(self, channel: Channel) -> None:
        if self._is_ready:
            return
        self.is_beginning = not self._has_begun
        try:
            channel.receive(seconds=START_SECONDS, most=1)
        except TimeoutError:
            self._end()
            raise LostError(
                f"asked again: no compile process began within {START_SECONDS:g} s"
            ) from None
        finally:
            self._has_begun, self.is_beginning = True, False
        self._is_ready = True

    def _lost(self, seconds: float) -> GrammarError:
        """The process is gone: why, and another begins."""
        status = self._end()
        self.start()
        if status == -signal.SIGXCPU:
            return OvertimeError(f"what compiles within {seconds:g} s")
        if status == -signal.SIGABRT:
            most = self._limits.memory_bytes >> 20
            return GrammarError(f"what compiles within {most:,} MiB of memory")
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return LostError(f"asked again: the compile process ended {how}")

    def _end(self) -> int:
        """Kill the process, where there is one; how it ended."""
        with self._state:
            process, channel = self._process, self._channel
            self._process = self._channel = None
        if process is None:
            return 0
        # Whoever closed its end has ended, or is about to: its own status says more than a kill.
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.kill()
        status = process.wait(_STOP_SECONDS)
        if channel is not None:
            channel.close()
        return status
