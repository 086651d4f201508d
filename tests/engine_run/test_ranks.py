"""Ranks that share each layer: the tokens of one rank, and every way in which one of them fails."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from reference import judge, rows
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.fp8_models import QUANTIZATION
from tests.engine_run.patience import time_for_grammars
from tests.engine_run.test_fp8_kv import scaled_folder
from tests.engine_run.tiny_models import folder_of, judged
from tests.forked import fork_server
from tests.waiting import wait_for

from tandem.engine.config import EngineConfig
from tandem.engine.executor import multiproc, process
from tandem.engine.executor.factory import make_executor
from tandem.engine.executor.multiproc import MultiprocExecutor
from tandem.engine.executor.wire import RankError
from tandem.engine.scheduler.request_table import RequestTable
from tandem.engine.step import SchedulerOutput, SeqId, StepRow
from tandem.llm import LLM, SamplingParams, StructuredOutputsParams
from tandem.protocol.commands import SleepTag
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.pooling import PoolingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(90)] for each in range(4)]
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=3, repetition_penalty=1.2)
SCORED = SamplingParams(temperature=0.8, seed=5, n=2, logprobs=2, prompt_logprobs=1)
SECONDS = 60.0


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's threads spin, which takes long on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def executor() -> Iterator[ForkedExecutor]:
    """An executor whose ranks are forked. It is stopped, and then no rank is left."""
    fork_server("rank")
    before = set(psutil.Process().children())
    made = ForkedExecutor()
    yield made
    made.stop()
    assert set(psutil.Process().children()) <= before


def engine(executor: MultiprocExecutor, name: str = "llama", **settings: Any) -> CPUEngine:
    settings = {"tensor_parallel_size": 2, "num_gpu_blocks_override": 40} | settings
    return CPUEngine(folder_of(name), executor=executor, **settings)


def outputs(made: CPUEngine, params: SamplingParams) -> list[EngineCoreOutput]:
    made.add(PROMPTS[0], 6, params)
    found: list[EngineCoreOutput] = []
    while made.core.has_work:
        for each in made.core.step().outputs.values():
            found += [output for output in each if isinstance(output, EngineCoreOutput)]
    return found


TIERS = {"llama-untied-biased": "full", "gemma3": "full", "phi3": "full"}
TIERS |= dict.fromkeys(["qwen2", "qwen3", "qwen3-window", "glm4", "olmo2"], "nightly")
ENOUGH = {"qwen3-window": 24, "gemma3": 120}
"""Blocks with which no row is preempted: windows bound what a row holds."""


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=getattr(pytest.mark, tier)) for name, tier in TIERS.items()),
    ],
)
def test_two_ranks_draw_the_tokens_of_one(
    executor: ForkedExecutor, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn batches in chunks, prefixes that are cached, rows that are preempted, scores
    of several choices and of the prompt."""
    preempted = []
    preempt = RequestTable.preempt

    def noted(table: RequestTable, request: Any) -> None:
        preempted.append(request)
        preempt(table, request)

    monkeypatch.setattr(RequestTable, "preempt", noted)
    small: dict[str, Any] = {
        "num_gpu_blocks_override": ENOUGH.get(name, 25),
        "max_num_batched_tokens": 48,
    }
    two = engine(executor, name, **small)
    one = CPUEngine(folder_of(name), **small)
    want = [judged(name, prompt, 12)[0] for prompt in PROMPTS]
    assert two.generate(PROMPTS, 12) == one.generate(PROMPTS, 12) == want
    assert bool(preempted) == (name not in ENOUGH)
    assert two.generate(PROMPTS[:1], 12) == want[:1]
    assert two.generate(PROMPTS[:1], 12) == want[:1]
    assert max(two.cached.values()) >= 64
    assert two.generate(PROMPTS, 12, DRAWN) == one.generate(PROMPTS, 12, DRAWN)
    got, expected = outputs(two, SCORED), outputs(one, SCORED)
    assert len(got) == len(expected) == 12
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.choice, ours.token_ids) == (theirs.choice, theirs.token_ids)
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert ours.logprobs[0].top_ids == theirs.logprobs[0].top_ids
        assert ours.logprobs[0].logprob == pytest.approx(theirs.logprobs[0].logprob, abs=1e-4)
        assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)
    two.core.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ranks_score_a_prompt_in_16_bits(executor: ForkedExecutor, dtype: str) -> None:
    """Scores differ from one rank's by the rounding of partial sums."""
    found = []
    one = CPUEngine(folder_of("qwen3"), dtype=dtype, num_gpu_blocks_override=40)
    for made in (engine(executor, "qwen3", dtype=dtype), one):
        scores = next(each.prompt_logprobs for each in outputs(made, SCORED))
        assert scores is not None
        found.append([each.logprob for each in scores if each is not None])
    assert len(found[0]) == len(PROMPTS[0]) - 1
    assert found[0] == pytest.approx(found[1], abs=0.2)


def fp8_folder(folder: Path, **differences: int) -> Path:
    """Write the config.json of a llama in fp8 whose heads are cut between blocks of 128."""
    config = json.loads((folder_of("llama", wide=True) / "config.json").read_text())
    config |= {"quantization_config": QUANTIZATION, "num_key_value_heads": 4, **differences}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.full
def test_ranks_cut_weights_in_blocks(executor: ForkedExecutor, tmp_path: Path) -> None:
    """Codes and scales of fp8 are cut along outputs and inputs, if parts are whole blocks. The last
    rank's part of the vocabulary is padded."""
    folder = fp8_folder(tmp_path, vocab_size=321)
    settings: dict[str, Any] = {"load_format": "dummy", "num_gpu_blocks_override": 40}
    two = CPUEngine(folder, executor=executor, tensor_parallel_size=2, **settings)
    assert two.generate(PROMPTS, 6) == CPUEngine(folder, **settings).generate(PROMPTS, 6)
    fp8_folder(tmp_path, num_key_value_heads=2)
    with pytest.raises(InvalidParameter, match="128 values of keys, in parts of a multiple of 128"):
        EngineConfig.of(tmp_path, device="cpu", tensor_parallel_size=2)


@pytest.mark.full
def test_ranks_hold_codes_by_the_scales_of_their_heads(
    executor: ForkedExecutor, tmp_path: Path
) -> None:
    folder = scaled_folder("llama", tmp_path / "scaled")
    settings: dict[str, Any] = {"num_gpu_blocks_override": 40, "kv_cache_dtype": "fp8"}
    two = CPUEngine(folder, executor=executor, tensor_parallel_size=2, **settings)
    assert two.generate(PROMPTS, 6) == CPUEngine(folder, **settings).generate(PROMPTS, 6)


@pytest.mark.full
def test_ranks_pool_vectors_and_record_steps(executor: ForkedExecutor, tmp_path: Path) -> None:
    """Vectors are those of one rank; each rank writes the file of its steps."""
    two = engine(executor, "qwen3")
    one = CPUEngine(folder_of("qwen3"), num_gpu_blocks_override=40)
    executor.profile(str(tmp_path))
    vectors = []
    for made in (two, one):
        key = made.pool(PROMPTS[0], PoolingParams())
        made.run()
        vectors.append(made.pooled[key.request].vector)
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-4)
    assert "rank0" in executor.profile(None)
    wait_for(lambda: len(list(tmp_path.glob("*-rank[01]-*.gz"))) == 2, SECONDS)


@pytest.mark.full
def test_three_ranks_draw_the_reference_tokens(executor: ForkedExecutor, smollm2: Path) -> None:
    """SmolLM2 has 9 heads over 3 of keys and values; two steps are in flight."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": 60, "async_scheduling": True}
    made = CPUEngine(smollm2, executor=executor, tensor_parallel_size=3, **settings)
    picked = [i for i, row in enumerate(rows()) if len(row.prompt) < 130][::5]
    got = made.generate([rows()[i].prompt for i in picked], 6)
    wrong, _ = judge(dict(zip(picked, got, strict=True)), 6)
    assert wrong == []


def test_a_program_runs_two_ranks(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting is enough; answers under a grammar are those of one rank."""
    monkeypatch.setattr(multiproc, "MultiprocExecutor", ForkedExecutor)
    asked = StructuredOutputsParams(regex=r"\d{3}-\d{4}")
    params = SamplingParams(temperature=1.0, seed=2, n=2, structured_outputs=asked)
    texts = []
    for size in (1, 2):
        settings: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 64}
        settings |= {"device": "cpu", "tensor_parallel_size": size}
        with time_for_grammars(), LLM(str(small), **settings) as llm:
            (answer,) = llm.generate(["Call"], params, use_tqdm=False)
        texts.append([each.text for each in answer.outputs])
    assert texts[0] == texts[1]
    assert all(re.fullmatch(r"\d{3}-\d{4}", each) for each in texts[1])


def test_ranks_sleep_and_wake_together(executor: ForkedExecutor) -> None:
    """Each rank drops its parts and loads them again; each has a region of its own heads."""
    made = engine(executor)
    want = made.generate(PROMPTS[:1], 4)
    assert [region.rank for region in executor.regions()] == [0, 1]
    for region in executor.regions():
        assert region.blocks.shape == (40, made.core.capacity.layout.block_bytes)
        assert region.blocks.count_nonzero() > 0
    assert made.core.capacity.layout.groups[0].num_kv_heads == 1
    assert executor.sleep(2)
    executor.wake_up(tuple(SleepTag))
    made.core.manager.reset_prefix_cache()
    assert made.generate(PROMPTS[:1], 4) == want


def test_a_rank_that_falls_asleep_alone_is_woken(
    executor: ForkedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sleep fails if a rank is silent; ranks that slept compute again before the next step."""
    made = engine(executor)
    want = made.generate(PROMPTS[:1], 4)
    last = executor.processes()[1]
    os.kill(last, signal.SIGSTOP)
    try:
        with monkeypatch.context() as short:
            short.setattr(multiproc, "MEMORY_SECONDS", 0.5)
            with pytest.raises(RankError, match=r"rank 1 did not answer within 0\.5 s"):
                executor.sleep(2)
    finally:
        os.kill(last, signal.SIGCONT)
    made.core.manager.reset_prefix_cache()
    assert made.generate(PROMPTS[:1], 4) == want


@pytest.mark.parametrize("idle", [True, False])
def test_a_killed_rank_ends_the_engine(executor: ForkedExecutor, idle: bool) -> None:
    """The error has the number of the rank that was killed, not of the one whose sum failed."""
    made = engine(executor)
    last = executor.processes()[1]
    if idle:
        os.kill(last, signal.SIGKILL)
    else:  # the first rank waits for its sum
        os.kill(last, signal.SIGSTOP)
        made.add(PROMPTS[0], 200)
        threading.Timer(0.5, os.kill, (last, signal.SIGKILL)).start()

    def stepped() -> bool:
        made.core.step()
        return False

    with pytest.raises(RankError, match=r"rank 1 has ended.*killed by signal 9 \(SIGKILL\)"):
        wait_for(stepped, SECONDS)


def test_a_silent_rank_is_named(executor: ForkedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without tokens ends on the first rank; the one that stands still is awaited."""
    monkeypatch.setattr(process, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(multiproc, "STOP_SECONDS", 0.5)
    executor.start(config_of(num_gpu_blocks_override=4))
    os.kill(executor.processes()[1], signal.SIGSTOP)
    future = executor.execute(SchedulerOutput(1, ()))
    with pytest.raises(RankError, match=r"rank 1 did not answer within 0\.5 s"):
        future.result(0.5)


def test_a_failed_step_is_the_last(executor: ForkedExecutor) -> None:
    """Ranks that failed may be out of step: later steps fail with the same error."""
    executor.start(config_of(num_gpu_blocks_override=4))
    with pytest.raises(RankError, match=r"rank [01]: KeyError"):
        executor.execute(SchedulerOutput(1, (StepRow(SeqId(3), 0, 1),))).result(SECONDS)
    with pytest.raises(RankError, match=r"rank [01]: KeyError"):
        executor.execute(SchedulerOutput(2, ())).result(SECONDS)


def config_of(name: str = "llama", **settings: Any) -> EngineConfig:
    given: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2, **settings}
    return EngineConfig.of(folder_of(name), **given)


class OneWithoutCache(ForkedExecutor):
    """An executor whose second rank cannot allocate."""

    def launched(self, number: int) -> process.RankProcess:
        made = super().launched(number)
        if number:
            import resource

            resource.prlimit(made.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return made


def test_a_rank_that_does_not_start_is_named() -> None:
    """The other rank waits for it in the group, and its error is only a consequence."""
    executor = OneWithoutCache()
    with pytest.raises(RankError, match="rank 1: OSError"):
        executor.start(config_of(num_gpu_blocks_override=4000))
    assert executor.processes() == {}


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"tensor_parallel_size": 3}, "a divisor of the model's 2 key and value heads"),
        ({"distributed_executor_backend": "uni"}, "1 with distributed_executor_backend=uni"),
        ({"kv_offloading_size": 0.5}, "1 with kv_offloading_size"),
        ({"device": "cuda"}, "1 on a GPU"),
        ({"name": "qwen3_5"}, "1 for Qwen3_5ForCausalLM, whose layers with states"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(settings: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidParameter, match=f"tensor_parallel_size: .*{allowed}"):
        config_of(**settings)


def test_a_hand_off_of_several_ranks_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="1 for a worker with a hand-off"):
        make_executor(config_of(), reach_memory=True)
    assert isinstance(make_executor(config_of()), MultiprocExecutor)
