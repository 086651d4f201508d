"""Workers whose rank is a child process: a hand-off through shared memory, and a child's end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.engine_plan.builders import params_of
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.tiny_models import folder_of
from tests.waiting import wait_for
from tests.workers.hand_router import Router
from tests.workers.pair import Pair
from tests.workers.proc_worker import Worker, started, submit

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.protocol.messages import Frame

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(240)]
SECONDS = 60.0


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the children: OpenMP's threads spin, which on a busy machine takes for ever."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_pair_hands_over_between_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes' worth of one hand-off: the movers here pack from P's slab and unpack into
    D's, whose rank then goes on as if it had computed it."""
    monkeypatch.setattr("tests.workers.pair.make_executor", lambda _: ForkedExecutor())
    pair = Pair(engine={"distributed_executor_backend": "mp"})
    try:
        pair.ask("a")
        pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
        tokens = pair.decode.tokens("a")
        assert pair.prefill.tokens("a") == tokens[:1]
        assert [tokens] == pair.alone()
        assert pair.consumer.progress() > 0
    finally:
        pair.close()


@pytest.fixture
def served() -> Iterator[tuple[Worker, int]]:
    """A worker over a child, and the child's process."""
    executor = ForkedExecutor()
    config = EngineConfig.of(
        folder_of("llama"), device="cpu", revision="test", num_gpu_blocks_override=64
    )
    worker = Worker(EngineCore.launch(config, executor))
    yield worker, executor.pid
    if worker.thread.is_alive():
        worker.end()
    worker.probes.close()
    executor.stop()


@pytest.mark.parametrize("idle", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_worker_ends_with_its_child(
    served: tuple[Worker, int], idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """kill -9 of the child: requests go back to the router, the worker ends with status 1 and says
    what happened, whether a step was under way or nothing at all."""
    worker, child = served
    router = Router(worker.proc.endpoint)
    router.greet()
    if not idle:
        submit(router, "long", params=params_of(max_tokens=400, ignore_eos=True))
        started(router)
    os.kill(child, signal.SIGKILL)
    while not idle and not router.hear(Frame).failed:
        pass
    wait_for(lambda: not worker.thread.is_alive(), SECONDS)
    assert worker.status == [1]
    assert worker.get("/health")[0] == 503
    assert "killed by signal 9 (SIGKILL)" in caplog.text
    router.socket.close()
