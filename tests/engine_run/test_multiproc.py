"""A rank in a child process: the same tokens, memory that both reach, and every way to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
import torch
from reference import judge, rows
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.tiny_models import folder_of, judged
from tests.forked import fork_server
from tests.waiting import wait_for

from tandem.engine.config import EngineConfig
from tandem.engine.executor.factory import make_executor
from tandem.engine.executor.multiproc import MultiprocExecutor
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.executor.wire import RankError
from tandem.engine.step import SchedulerOutput, SeqId, StepRow
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(240)]
PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(90)] for each in range(4)]
SECONDS = 60.0


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the children: OpenMP's threads spin, which on a busy machine takes for ever."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def executor() -> Iterator[MultiprocExecutor]:
    """One whose rank is forked; ended whatever happened, and its child is gone then."""
    yield from ended(ForkedExecutor())


@pytest.fixture
def started() -> Iterator[MultiprocExecutor]:
    """One whose rank is started as those of an engine are."""
    yield from ended(MultiprocExecutor())


def ended(made: MultiprocExecutor) -> Iterator[MultiprocExecutor]:
    fork_server("rank")
    before = set(psutil.Process().children())
    yield made
    made.stop()
    assert set(psutil.Process().children()) <= before


def engine(executor: MultiprocExecutor, **settings) -> CPUEngine:
    settings = {"num_gpu_blocks_override": 40} | settings
    return CPUEngine(folder_of("llama"), executor=executor, **settings)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_one_process(executor, overlap):
    """Chunks, decodes, preemptions and drops over a child: what the model alone gives."""
    made = engine(
        executor,
        num_gpu_blocks_override=14,
        max_num_batched_tokens=48,
        async_scheduling=overlap,
        kv_offloading_size=0.001,
    )
    want = [judged("llama", prompt, 12)[0] for prompt in PROMPTS]
    for _ in range(2):
        assert made.generate(PROMPTS, 12) == want
    tier = made.core._offload
    assert tier is not None
    assert tier.stats.hit_tokens > 0
    made.core.check_integrity()


def test_scores_and_rules_come_across(executor):
    """Log-probabilities, of the prompt too, and rules that look back at tokens: as in-process."""
    params = SamplingParams(
        temperature=0.8, seed=3, logprobs=2, prompt_logprobs=1, repetition_penalty=1.3, n=2
    )
    said = []
    for runs in (executor, UniProcExecutor()):
        made = CPUEngine(folder_of("llama"), executor=runs, num_gpu_blocks_override=40)
        made.add(PROMPTS[0], 6, params)
        outputs = []
        while made.core.has_work:
            for each in made.core.step().outputs.values():
                outputs += each
        said.append(outputs)
        made.core.close()
    assert len(said[0]) == len(said[1]) == 12
    for one, other in zip(*said, strict=True):
        assert (one.choice, one.position, one.token_ids) == (
            other.choice,
            other.position,
            other.token_ids,
        )
        assert one.logprobs[0].top_ids == other.logprobs[0].top_ids
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


@pytest.mark.nightly
def test_smollm2_draws_the_reference_tokens_in_a_child(started, smollm2):
    """transformers' greedy tokens, two steps in flight."""
    made = CPUEngine(smollm2, executor=started, num_gpu_blocks_override=60, async_scheduling=True)
    picked = [i for i, row in enumerate(rows()) if len(row.prompt) < 130][::5]
    got = made.generate([rows()[i].prompt for i in picked], 6)
    cut = {i: [*tokens, *rows()[i].tokens[6:]] for i, tokens in zip(picked, got, strict=True)}
    wrong, _ = judge(cut)
    assert wrong == []


def test_two_steps_are_in_flight(executor):
    """A second plan is taken while the first has no result yet, and results come in order, also
    when the later one is asked for first."""
    executor.start(EngineConfig.of(folder_of("llama"), device="cpu", num_gpu_blocks_override=4))
    first = executor.execute(SchedulerOutput(1, ()))
    second = executor.execute(SchedulerOutput(2, ()))
    assert not first.done()
    assert second.result(SECONDS).step == 2
    assert first.done()
    assert first.result(SECONDS).step == 1
    assert first.result().fence.done()


def test_the_slab_is_seen_from_here(executor):
    """What a step writes can be read here, and what is written here is what a step reads: a block
    moved by hand changes what is drawn."""
    made = engine(executor)
    (want,) = made.generate(PROMPTS[:1], 4)
    (region,) = executor.regions()
    assert region.rank == 0
    assert region.blocks.shape == (40, made.core.capacity.layout.block_bytes)
    assert region.blocks.dtype == torch.uint8
    kept = region.blocks.clone()
    assert kept.count_nonzero() > 0
    region.blocks.zero_()
    (blind,) = made.generate(PROMPTS[:1], 4)
    region.blocks.copy_(kept)
    (again,) = made.generate(PROMPTS[:1], 4)
    assert blind != want
    assert again == want


def test_what_a_step_raises_is_in_its_future(executor):
    """By the rank and the error's name; the rank goes on."""
    executor.start(EngineConfig.of(folder_of("llama"), device="cpu", num_gpu_blocks_override=4))
    with pytest.raises(RankError, match="rank 0: KeyError"):
        executor.execute(SchedulerOutput(1, (StepRow(SeqId(3), 0, 1),))).result(SECONDS)
    assert executor.execute(SchedulerOutput(2, ())).result(SECONDS).step == 2


def test_what_the_start_raises_is_raised_here(executor, tmp_path):
    """A wrong setting as such, missing weights by name; the child is gone."""
    too_little = EngineConfig.of(folder_of("llama"), device="cpu", kv_cache_memory_bytes=10)
    with pytest.raises(InvalidParameter, match="kv_cache_memory_bytes: 10 is not allowed"):
        executor.start(too_little)
    (tmp_path / "config.json").write_text((folder_of("llama") / "config.json").read_text())
    with pytest.raises(RankError, match="rank 0: LoadError"):
        executor.start(EngineConfig.of(tmp_path, device="cpu", revision="none"))


@pytest.mark.parametrize("idle", [True, False])
def test_a_killed_child_is_a_clear_error(executor, idle):
    """kill -9, while a step is under way or while nothing is: the next look says who and how."""
    made = engine(executor)
    if not idle:
        made.add(PROMPTS[0], 200)
        made.core.step()
    os.kill(executor.pid, signal.SIGKILL)

    def stepped() -> bool:
        made.core.step()
        return False

    with pytest.raises(RankError, match=r"rank 0 has ended.*killed by signal 9 \(SIGKILL\)"):
        wait_for(stepped, SECONDS)


def test_a_silent_child_is_not_waited_for(executor):
    """A child that stands still fails its step by the deadline, and is killed at the stop."""
    executor.start(EngineConfig.of(folder_of("llama"), device="cpu", num_gpu_blocks_override=4))
    os.kill(executor.pid, signal.SIGSTOP)
    future = executor.execute(SchedulerOutput(1, ()))
    with pytest.raises(RankError, match=r"did not answer within 0\.2 s"):
        future.result(0.2)
    os.kill(executor.pid, signal.SIGCONT)


def test_the_child_ends_with_the_engines_process(started):
    """Whatever becomes of this process, its end of the channel closes and the child goes; signals
    that are meant for this process do not end it before."""
    started.start(EngineConfig.of(folder_of("llama"), device="cpu", num_gpu_blocks_override=4))
    child = psutil.Process(started.pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    assert started.execute(SchedulerOutput(1, ())).result(SECONDS).step == 1
    assert started._ranks
    started._ranks[0].channel.close()
    wait_for(lambda: child.status() == psutil.STATUS_ZOMBIE, SECONDS)


def test_the_factory_makes_what_the_setting_says():
    """uni unless mp is asked for; memory on a GPU that cannot be reached is refused before weights
    are loaded, as is a slab that somebody else would give."""
    config = EngineConfig.of(folder_of("llama"), device="cpu")
    assert isinstance(make_executor(config), UniProcExecutor)
    apart = config.with_(distributed_executor_backend="mp")
    assert isinstance(make_executor(apart, reach_memory=True), MultiprocExecutor)
    on_gpu = apart.with_(device="cuda")
    assert isinstance(make_executor(on_gpu), MultiprocExecutor)
    with pytest.raises(InvalidParameter, match="uni for a hand-off on a GPU"):
        make_executor(on_gpu, reach_memory=True)
    with pytest.raises(InvalidParameter, match="uni if the engine's process"):
        MultiprocExecutor().start(apart, torch.zeros)
