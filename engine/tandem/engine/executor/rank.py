"""One rank in its own process: ``python -m tandem.engine.executor.rank DESCRIPTOR``.

Started by MultiprocExecutor with an open channel; ends when the channel closes. Plans are launched
while earlier steps run; results are sent in order.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from tandem.engine.executor.channel import Channel, ChannelClosed, inherited
from tandem.engine.executor.wire import (
    Failed,
    MemoryMoved,
    MoveMemory,
    Planned,
    Profile,
    Profiled,
    Start,
    Started,
    StepResult,
    decode_plan,
    decode_start,
    encode,
    failed,
)
from tandem.engine.step import TokenMasks
from tandem.engine.threads import nap, spin_briefly
from tandem.link.naps import nap_precisely
from tandem.memory.shared import SharedMemory
from tandem.protocol.errors import TandemError

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.engine.ranks import Ranks
    from tandem.engine.worker import LaunchedStep, Worker

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Seconds within which the engine's first message must come."""
SEND_SECONDS = 600.0
"""Seconds after which an engine that does not take a result has hung."""

STOP_SECONDS = 10.0
"""Maximum wait for a step after the channel closed."""
THREADS = "OMP_NUM_THREADS"


class Rank:
    """Runs plans from a channel on a Worker."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._plans: queue.SimpleQueue[Planned | None] = queue.SimpleQueue()
        """None is the end: the channel is closed."""
        self._launched: deque[LaunchedStep | Exception] = deque()

    def start(self, message: Start) -> Worker:
        threading.Thread(target=self._read, name="plans", daemon=True).start()
        spin_briefly()
        config = message.config
        ranks = _joined(message)
        from tandem.engine.worker import Worker

        made: list[SharedMemory] = []

        def allocate(size: int) -> Tensor:
            made.append(SharedMemory.make(size))
            return made[0].tensor()

        worker = Worker(config, ranks)
        shares = config.device == "cpu" and self._channel.sends_descriptors
        capacity = worker.start(allocate if shares else None)
        size = made[0].size if made else 0
        self._channel.send(encode(Started(capacity, size)), seconds=SEND_SECONDS)
        for memory in made:
            self._channel.send_descriptor(memory.descriptor)
            memory.close()
        return worker

    def run(self, worker: Worker) -> None:
        nap_precisely()
        while True:
            try:
                plan = self._plans.get(block=not self._can_finish)
            except queue.Empty:
                self._finish_oldest()
                continue
            if plan is None:
                return
            if isinstance(plan, TokenMasks):
                self._draw(worker, plan)
                continue
            if isinstance(plan, MoveMemory):
                self._channel.send(encode(_moved(worker, plan)), seconds=SEND_SECONDS)
                continue
            if isinstance(plan, Profile):
                self._channel.send(encode(_profiled(worker, plan)), seconds=SEND_SECONDS)
                continue
            try:
                self._launched.append(worker.launch(plan))
            except Exception as error:
                logger.exception("step %d failed", plan.step)
                self._launched.append(error)

    @property
    def _can_finish(self) -> bool:
        if not self._launched:
            return False
        oldest = self._launched[0]
        return isinstance(oldest, Exception) or not oldest.awaits_masks

    def _draw(self, worker: Worker, masks: TokenMasks) -> None:
        if isinstance(self._launched[-1], Exception):
            return  # it failed, and its result reports that
        try:
            worker.draw(masks)
        except Exception as error:
            logger.exception("step %d failed", masks.step)
            self._launched[-1] = error

    def _read(self) -> None:
        """Read plans from the channel while a step runs; otherwise sending one would block."""
        try:
            while True:
                self._plans.put(decode_plan(self._channel.receive(seconds=None)))
        except Exception as error:
            if not isinstance(error, ChannelClosed):
                logger.exception("a plan could not be read")
        self._plans.put(None)
        time.sleep(STOP_SECONDS)  # a daemon thread: it ends with the process
        logger.error("the engine has ended, a step or start hangs, and the rank ends")
        os._exit(1)

    def _finish_oldest(self) -> None:
        step = self._launched[0]
        if not isinstance(step, Exception):
            while not step.fence.done():  # fences cannot be sent
                if not self._plans.empty():
                    return
                nap()
        self._launched.popleft()
        self._channel.send(encode(self._result_of(step)), seconds=SEND_SECONDS)

    def _result_of(self, step: LaunchedStep | Exception) -> StepResult | Failed:
        if isinstance(step, Exception):
            return failed(step)
        try:
            if self._number:
                step.wait_tokens()
                return StepResult(step.step, ())
            return StepResult.of(step.result())
        except Exception as error:
            logger.exception("step %d failed", step.step)
            return failed(error)


def _joined(message: Start) -> Ranks:
    """Return the rank of ``message`` in its group. The machine's cores are shared out, unless the
    environment sets the threads."""
    import torch

    from tandem.engine.ranks import Ranks

    size, device = message.config.parallel.tensor_parallel_size, message.config.device
    if size > 1 and THREADS not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    return Ranks.join(message.rank, size, store=message.store, device=device)


def _moved(worker: Worker, asked: MoveMemory) -> MemoryMoved | Failed:
    try:
        if asked.level:
            return MemoryMoved(worker.rest.sleep(asked.level))
        worker.rest.wake_up(asked.tags)
        return MemoryMoved(0)
    except Exception as error:
        logger.exception("memory could not be moved")
        return failed(error)


def _profiled(worker: Worker, asked: Profile) -> Profiled:
    try:
        return Profiled(worker.recorded(asked.folder))
    except TandemError as error:
        return Profiled("", str(error))


def main(descriptor: int) -> int:
    """Run the process; return its exit status."""
    # The engine's process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = inherited(descriptor)
    try:
        message = decode_start(channel.receive(seconds=START_SECONDS))
        logging.basicConfig(
            level=message.log_level,
            format=f"%(asctime)s %(levelname).1s rank {message.rank} %(name)s: %(message)s",
            datefmt="%H:%M:%S",
        )
        rank = Rank(channel, message.rank)
        try:
            worker = rank.start(message)
        except ChannelClosed:
            raise
        except Exception as error:
            if not isinstance(error, TandemError):
                logger.exception("the rank did not start")
            channel.send(encode(failed(error)), seconds=SEND_SECONDS)
            return 1
        rank.run(worker)
        worker.ranks.leave()
    except ChannelClosed:
        logger.info("the engine has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
