"""A rank that answers after its deadline: what it says is no later question's answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.tiny_models import folder_of, judged
from tests.waiting import wait_for

from tandem.engine.executor import multiproc
from tandem.engine.executor.wire import RankError
from tandem.engine.step import SchedulerOutput
from tandem.protocol.commands import Command, CommandName, SleepTag

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(240)]
PROMPT = [(7 * at) % 300 + 5 for at in range(40)]
SECONDS = 60.0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[CPUEngine]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = CPUEngine(folder_of("llama"), executor=ForkedExecutor(), num_gpu_blocks_override=40)
    yield made
    made.core.close()


def rank_of(engine: CPUEngine) -> ForkedExecutor:
    assert isinstance(engine.executor, ForkedExecutor)
    return engine.executor


@contextmanager
def held_up(executor: ForkedExecutor, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the block the rank stands still and is not waited for; then it goes on."""
    os.kill(executor.pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as short:
            short.setattr(multiproc, "MEMORY_SECONDS", 0.2)
            short.setattr(multiproc, "PROFILE_SECONDS", 0.2)
            yield
    finally:
        os.kill(executor.pid, signal.SIGCONT)


def test_a_profile_that_is_begun_late_is_no_steps_result(
    engine: CPUEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps go on, and the next question about profiles has its own answer."""
    executor = rank_of(engine)
    with held_up(executor, monkeypatch), pytest.raises(RankError, match="did not answer within"):
        executor.profile(str(tmp_path))
    assert executor.execute(SchedulerOutput(1, ())).result(SECONDS).step == 1
    wait_for(Path(executor.profile(None)).is_file, SECONDS)
    assert executor.execute(SchedulerOutput(2, ())).result(SECONDS).step == 2


def test_a_sleep_that_comes_late_is_undone_before_the_next_step(
    engine: CPUEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was told that it is awake: its rank has weights and memory when it computes."""
    executor = rank_of(engine)
    before = engine.generate([PROMPT], 6)
    assert before == [judged("llama", PROMPT, 6)[0]]
    with held_up(executor, monkeypatch):
        command = Command(id=1, name=CommandName.SLEEP, args={"level": 2})
        reply = engine.core.call(command)
    assert not reply.ok
    assert "did not answer within" in reply.message
    assert not engine.core.call(Command(id=2, name=CommandName.IS_SLEEPING)).values["asleep"]
    assert engine.generate([PROMPT], 6) == before
    assert engine.core.call(Command(id=3, name=CommandName.SLEEP, args={"level": 2})).ok
    assert engine.core.call(Command(id=4, name=CommandName.WAKE_UP)).ok
    assert engine.generate([PROMPT], 6) == before


def test_a_wake_that_comes_late_is_asked_for_again(
    engine: CPUEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first answer is not the second's; the engine is awake afterwards."""
    executor = rank_of(engine)
    before = engine.generate([PROMPT], 6)
    assert executor.sleep(2)
    with held_up(executor, monkeypatch), pytest.raises(RankError, match="did not answer within"):
        executor.wake_up([SleepTag.WEIGHTS])
    executor.wake_up([SleepTag.WEIGHTS])
    executor.wake_up([SleepTag.KV_CACHE])
    engine.core.manager.reset_prefix_cache()
    assert engine.generate([PROMPT], 6) == before
