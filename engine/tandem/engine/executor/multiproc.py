"""Executor of ranks in child processes; plans and results are sent over a channel to each.

The engine's threads and garbage do not delay a step. Each process sees the other's end at once. On
a CPU both map the KV cache, so that hand-offs move blocks from here.

Every rank gets every plan and draws the same tokens; the first one's result counts. Several ranks
that share layers are out of step after a failure, so that no step follows one.
"""

from __future__ import annotations

import logging
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from tandem.engine.config import EngineConfig
from tandem.engine.executor.channel import Channel
from tandem.engine.executor.process import (
    STEP_SECONDS,
    STOP_SECONDS,
    RankProcess,
    RankSilent,
)
from tandem.engine.executor.wire import (
    Failed,
    MoveMemory,
    Profile,
    RankError,
    Start,
    StepResult,
    error_of,
)
from tandem.engine.kv_memory import Capacity, KVCacheAllocator, KVRegion
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from tandem.protocol.commands import MEMORY_SECONDS, PROFILE_SECONDS, SleepTag
from tandem.protocol.errors import InvalidParameter, TandemError

logger = logging.getLogger(__name__)

START_SECONDS = 3600.0
"""Time to load the weights."""
CAUSE_SECONDS = 15.0
"""Time after a failed exchange in which the rank that caused it is awaited."""
Answer = TypeVar("Answer")


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
    """Executor of ranks in child processes, for one thread."""

    def __init__(self) -> None:
        self._ranks: list[RankProcess] = []
        self._capacity: Capacity | None = None
        self._pending: deque[RankFuture] = deque()
        """Steps without a result, in order."""
        self._failure: TandemError | None = None
        """Failure of one of several ranks."""

    def start(self, config: EngineConfig, allocate: KVCacheAllocator | None = None) -> Capacity:
        """Start the children. Raises InvalidParameter for an allocator: the memory is theirs."""
        assert not self._ranks, "the executor has started already"
        if allocate is not None:
            allowed = "uni if the engine's process allocates the KV cache's memory"
            raise InvalidParameter("distributed_executor_backend", "mp", allowed)
        try:
            for number in range(config.parallel.tensor_parallel_size):
                self._ranks.append(self.launched(number))
            with self.store() as url:
                self._capacity = self._begin(config, url)
        except BaseException:
            self.stop()
            raise
        for each in self._ranks:
            logger.info("rank %d runs in process %d", each.number, each.process.pid)
        return self._capacity

    def launched(self, number: int) -> RankProcess:
        """Start rank ``number``, and return it with a channel to it."""
        here, there = socket.socketpair()
        with there:
            return RankProcess(number, self.launch(there.fileno()), Channel(here))

    @contextmanager
    def store(self) -> Iterator[str]:
        """Yield the URL by which the launched ranks find each other."""
        with TemporaryDirectory(prefix="tandem-ranks-") as folder:
            yield (Path(folder) / "store").as_uri()

    def launch(self, descriptor: int) -> subprocess.Popen[bytes]:
        """Start a rank's process, which has its own end of the channel under ``descriptor``."""
        command = [sys.executable, "-P", "-m", "tandem.engine.executor.rank", str(descriptor)]
        return subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future = RankFuture(self)
        try:
            if self._failure is not None:
                raise self._failure
            self._settle_memory()
            for each in self._open:
                each.send(plan)
        except TandemError as error:
            future.set_exception(error)
        else:
            self._pending.append(future)
        return future

    def draw(self, masks: TokenMasks) -> None:
        for each in self._open:
            with suppress(RankError):
                each.send(masks)

    def regions(self) -> tuple[KVRegion, ...]:
        """Raise InvalidParameter on a GPU: the children's memory is unreachable."""
        assert self._capacity is not None, "the executor has not started, or has stopped"
        size = self._capacity.layout.block_bytes
        regions = []
        for each in self._ranks:
            if each.memory is None:
                raise unreachable()
            blocks = each.memory.tensor()[: self._capacity.num_blocks * size].view(-1, size)
            regions.append(KVRegion(each.number, blocks))
        return tuple(regions)

    def sleep(self, level: int) -> int:
        return self._move_memory(MoveMemory(level=level))

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        self._move_memory(MoveMemory(tags=tuple(tags)))

    def profile(self, folder: str | None) -> str:
        """See Executor. Each rank writes a file; the first one's is returned."""
        for each in self._open:
            each.send(Profile(folder))
        answers, silent = [], None
        for each in self._ranks:
            try:
                answers.append(each.profiled(PROFILE_SECONDS))
            except RankSilent as error:
                silent = error
        if silent is not None:
            raise silent
        for number, answer in enumerate(answers):
            if answer.error is not None:
                raise RankError(f"rank {number}: {answer.error}")
        return answers[0].path

    def processes(self) -> Mapping[int, int]:
        return {each.number: each.process.pid for each in self._ranks}

    def check_health(self) -> None:
        for each in self._ranks:
            if each.process.poll() is not None:
                raise each.gone()

    def stop(self) -> None:
        """Close the channels, at which the children end; kill those that do not."""
        ranks, self._ranks, self._capacity = self._ranks, [], None
        self._pending.clear()
        for each in ranks:
            each.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for each in ranks:
            if not each.ended(max(0.0, deadline - time.monotonic())):
                logger.warning("rank %d did not end within %g s", each.number, STOP_SECONDS)

    @property
    def pid(self) -> int:
        """Return the process id of the first rank."""
        return self._open[0].process.pid

    def take_result(self, seconds: float) -> None:
        """Set the result of the oldest step. Raises RankError if a rank ended, or is silent."""
        without = [each for each in self._open if not each.results]
        self._receive(without, lambda rank: rank.receive_result(seconds), seconds)
        answers = {each.number: each.results.popleft() for each in self._ranks if each.results}
        future = self._pending.popleft()
        error = _cause(answers)
        if error is None:
            first = answers[0]
            assert isinstance(first, StepResult), "no rank has failed"
            future.set_result(first.output())
            return
        future.set_exception(error)
        if len(self._ranks) > 1:
            self._failure = error

    def _begin(self, config: EngineConfig, store: str) -> Capacity:
        level = logging.getLogger().getEffectiveLevel()
        for each in self._ranks:
            each.send(Start(config, level, each.number, store))
        answers = self._receive(
            self._ranks, lambda rank: rank.started(START_SECONDS), START_SECONDS
        )
        error = _cause(answers)
        if error is not None:
            raise error
        first = answers[0]
        assert isinstance(first, Capacity), "no rank has failed"
        return first

    @staticmethod
    def _receive(
        ranks: Sequence[RankProcess],
        receive: Callable[[RankProcess], Answer | Failed],
        seconds: float,
    ) -> dict[int, Answer | Failed]:
        """Return each rank's next message, received as it comes. After a failure, return what came
        before; after that of an exchange, wait shortly for its cause. Raises RankError."""
        deadline = time.monotonic() + seconds
        answers: dict[int, Answer | Failed] = {}
        waiting = {each.channel.fileno(): each for each in ranks}
        poller = select.poll()
        for descriptor in waiting:
            poller.register(descriptor, select.POLLIN)
        while waiting:
            ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready and any(isinstance(each, Failed) for each in answers.values()):
                return answers
            if not ready:
                raise next(iter(waiting.values())).silent(seconds)
            for descriptor, _ in ready:
                poller.unregister(descriptor)
                rank = waiting.pop(descriptor)
                answer = answers[rank.number] = receive(rank)
                if isinstance(answer, Failed) and not answer.of_group:
                    return answers
                if isinstance(answer, Failed):
                    deadline = min(deadline, time.monotonic() + CAUSE_SECONDS)
        return answers

    def _move_memory(self, asked: MoveMemory) -> int:
        assert not self._pending, "memory is moved between steps"
        self._settle_memory()
        return self._ask_memory(asked, self._open)

    def _settle_memory(self) -> None:
        """Read late answers, and wake ranks that fell asleep alone. May be called again after an
        error."""
        for each in self._open:
            if each.late is not None:
                asked = each.late
                answer = each.memory_moved(asked, MEMORY_SECONDS)
                each.overslept = not isinstance(answer, Failed) and asked.level > 0
                each.late = None
        overslept = [each for each in self._ranks if each.overslept]
        if overslept:
            self._ask_memory(MoveMemory(tags=tuple(SleepTag)), overslept)
            for each in overslept:
                each.overslept = False

    @staticmethod
    def _ask_memory(asked: MoveMemory, ranks: Sequence[RankProcess]) -> int:
        for each in ranks:
            each.send(asked)
        nbytes, moved = 0, []
        error: TandemError | None = None
        for each in ranks:
            try:
                answer = each.memory_moved(asked, MEMORY_SECONDS)
            except RankSilent as silent:
                error = error or silent
                continue
            if isinstance(answer, Failed):
                error = error or error_of(answer, each.number)
            else:
                nbytes += answer.nbytes
                moved.append(each)
        if error is not None:
            for each in moved:
                each.overslept = asked.level > 0
            raise error
        return nbytes

    @property
    def _open(self) -> list[RankProcess]:
        assert self._ranks, "the executor has not started, or has stopped"
        return self._ranks


def _cause(answers: Mapping[int, object]) -> TandemError | None:
    """Return the error of the first rank that failed, of one whose exchange failed only if no other
    has failed; None if none has."""
    failures = [(rank, each) for rank, each in answers.items() if isinstance(each, Failed)]
    failures.sort(key=lambda each: each[1].of_group)
    return error_of(failures[0][1], failures[0][0]) if failures else None


def unreachable() -> InvalidParameter:
    """Return the error that a rank's memory on a GPU is unreachable from another process."""
    allowed = "uni for a hand-off on a GPU: memory there is not shared between processes yet"
    return InvalidParameter("distributed_executor_backend", "mp", allowed)
