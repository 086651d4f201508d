"""Memory, start and stop of a rank, and the executor around it."""

import os
from dataclasses import replace

import msgspec
import pytest
import torch
from tests.engine_run.tiny_models import folder_of

from tandem.engine.attention import select_backend
from tandem.engine.attention.select import PagedAttention
from tandem.engine.config import EngineConfig
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.quant import select_method
from tandem.engine.quant.dense import DenseMethod, PackedMethod
from tandem.engine.step import NewSequence, SchedulerOutput, SeqId, StepRow
from tandem.engine.threads import SPIN_COUNT, WAIT_POLICY, StepThreads, spin_briefly
from tandem.engine.worker import gpu, worker
from tandem.engine.worker.input_batch import BlockTable
from tandem.engine.worker.kv_cache import KVCacheMemory, check_device
from tandem.kernels import Backend
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

CPU = torch.device("cpu")


def config(**settings):
    return EngineConfig.of(folder_of("llama"), device="cpu", **settings)


def test_capacity_is_what_was_asked_for():
    """An override, then a number of bytes, then what memory allows and the engine can use."""
    layout = config().layout
    asked = config(num_gpu_blocks_override=7)
    assert worker.num_blocks(asked, layout, CPU) == 7
    by_bytes = config(kv_cache_memory_bytes=layout.block_bytes * 5 + 1)
    assert worker.num_blocks(by_bytes, layout, CPU) == 5
    useful = config(max_num_seqs=2, max_model_len=100)
    assert worker.num_blocks(useful, layout, CPU) == 2 * 7
    with pytest.raises(InvalidParameter, match="kv_cache_memory_bytes"):
        worker.num_blocks(config(kv_cache_memory_bytes=10), layout, CPU)


@pytest.mark.parametrize(
    ("size", "captured"),
    [(12, ""), (16, "32 16"), (80, "32 16"), (256, "32 16"), (512, "16"), (520, "")],
)
def test_attention_that_reads_the_device_is_in_no_graph(size, captured):
    """A capture would fail, and the start with it: such a model runs kernel by kernel."""
    facts = replace(config().facts, head_dim=size)
    for dtype in ("float32", "bfloat16", "float16"):
        graphs = bool(gpu._shapes(config(facts=facts, dtype=dtype)))
        assert graphs == (dtype[-2:] in captured)
    assert gpu._shapes(config(facts=facts, attention_backend="torch")) == []


def test_rows_have_room_for_the_longest_prompt_from_the_start():
    """A prompt longer than any before makes no copy of all rows in the middle of a step."""
    executor = UniProcExecutor()
    executor.start(config(max_model_len=500, num_gpu_blocks_override=40))
    try:
        batch = executor.worker.runner.batch
        tokens, blocks = batch.tokens, batch.table.blocks
        batch.add(NewSequence(SeqId(0), [1] * 500, 500, SamplingParams(seed=1), 0, (), ([0] * 32,)))
        assert batch.tokens is tokens
        assert batch.table.blocks is blocks
    finally:
        executor.stop()


def test_the_slab_lies_as_the_layout_says():
    """A block is one row of bytes: [layer][K|V][kv_head][token][head_dim]."""
    (group, _), *_ = groups = config().layer_groups
    kv_cache = KVCacheMemory(groups, 4, CPU)
    kv_cache.memory.zero_()
    kv_cache.layers[2][3, 1, 1, 5] = torch.arange(1.0, group.head_dim + 1)
    block = kv_cache.blocks[3].view(torch.float32).view(group.block_shape)
    assert block[2, 1, 1, 5].tolist() == list(range(1, group.head_dim + 1))
    assert kv_cache.blocks[:3].count_nonzero() == 0


def test_the_slab_takes_injected_memory():
    """A role's allocator owns the memory; what it gives is checked."""
    groups = config().layer_groups
    given = []

    def allocate(size):
        given.append(torch.zeros(size + 100, dtype=torch.uint8))
        return given[0]

    kv_cache = KVCacheMemory(groups, 3, CPU, allocate)
    kv_cache.layers[0].fill_(1.0)
    assert given[0].count_nonzero() > 0
    assert kv_cache.memory.data_ptr() == given[0].data_ptr()
    with pytest.raises(AssertionError, match="allocator gave 5 of"):
        KVCacheMemory(groups, 3, CPU, lambda size: torch.zeros(5, dtype=torch.uint8))


def test_an_executor_starts_once_and_stops_twice():
    """What it gives at start is what it holds; afterwards it says that it has stopped."""
    executor = UniProcExecutor()
    with pytest.raises(AssertionError, match="not started"):
        executor.execute(SchedulerOutput(1, ()))
    held = executor.start(config(num_gpu_blocks_override=4))
    assert held.num_blocks == 4
    assert held.layout == config().layout
    blocks = executor.worker.kv_cache_blocks()
    assert blocks.shape == (4, held.layout.block_bytes)
    executor.stop()
    executor.stop()
    with pytest.raises(AssertionError, match="not started"):
        executor.worker.kv_cache_blocks()


def test_what_a_step_raises_is_in_its_future():
    """The step loop meets the error where it takes the results of the step."""
    executor = UniProcExecutor()
    executor.start(config(num_gpu_blocks_override=4))
    future = executor.execute(SchedulerOutput(1, (StepRow(SeqId(3), 0, 1),)))
    with pytest.raises(KeyError):
        future.result()


def test_dummy_weights_need_no_weights(tmp_path):
    """load_format dummy starts from config.json alone, and equal seeds are equal models."""
    (tmp_path / "config.json").write_text((folder_of("qwen3") / "config.json").read_text())
    logits = []
    for seed in (1, 1, 2):
        executor = UniProcExecutor()
        executor.start(
            EngineConfig.of(
                tmp_path, device="cpu", load_format="dummy", seed=seed, num_gpu_blocks_override=2
            )
        )
        model = executor.worker.runner.model
        logits.append(model.logits(torch.ones(1, 48)))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert logits[0].isfinite().all()


def test_block_tables_grow():
    """A row takes more blocks than there was room for; others keep theirs."""
    table = BlockTable(2, 2, groups=2, states=1)
    table.assign(0, [[5, 6], [-1, 4], [8]])
    table.append(1, [[1], [2]])
    table.append(0, [[7, 8, 9], [3]])
    assert table.blocks[0, 0, :5].tolist() == [5, 6, 7, 8, 9]
    assert table.blocks[1, 0, :3].tolist() == [0, 4, 3]
    assert table.blocks[:, 1, 0].tolist() == [1, 2]
    assert table.counts.tolist() == [[5, 1], [3, 1]]
    assert table.states.tolist() == [[8, 0]]
    table.assign(0, [[3], [6], [7]])
    assert table.counts[:, 0].tolist() == [1, 1]
    assert table.states[0, 0] == 7


def test_backends_are_chosen_or_refused_with_a_reason():
    """By default each op has its own; a backend that cannot run here says why."""
    group = config().layout.groups[0]
    assert select_backend([group], CPU).name == "auto"
    assert select_backend([group], CPU, "torch").name == "torch"
    with pytest.raises(InvalidParameter, match=r"triton"):
        select_backend([group], CPU, "triton")
    with pytest.raises(InvalidParameter, match="one of torch"):
        select_backend([group], CPU, "flash")
    assert PagedAttention(16, None).supports(group, CPU).yes
    codes = msgspec.structs.replace(group, dtype="float8_e4m3fn")
    assert PagedAttention(16, Backend.TRITON).supports(codes, torch.device("cuda")).yes


def test_codes_are_refused_by_a_gpu_that_does_not_convert_them(monkeypatch):
    """By the name of the setting, before anything is allocated; other types are not asked."""
    plain, codes = config().layer_groups, config(kv_cache_dtype="fp8").layer_groups
    on = torch.device("cuda")
    for capability in ((8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        check_device(codes, on)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    check_device(plain, on)
    check_device(codes, CPU)
    words = "kv_cache_dtype: 'fp8'.* requires compute capability 8.9, and the GPU has 8.6"
    with pytest.raises(InvalidParameter, match=words):
        check_device(codes, on)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 17])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [24, 64])
def test_packed_weights_multiply_as_plain_ones(rows, dtype, with_bias, width):
    """Any number of rows, with and without bias. Widths of no whole blocks are left to torch."""
    weight, x = torch.randn(40, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)
    bias = torch.randn(40, dtype=dtype) if with_bias else None
    method = select_method(CPU, dtype)
    assert isinstance(method, PackedMethod)
    got = method.hold(weight, bias)(x)
    want = DenseMethod().hold(weight, bias)(x)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=1e-2)


def test_threads_spin_briefly_unless_told_otherwise(monkeypatch):
    """A short spin is the default; the user's word on waiting stays."""
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    monkeypatch.setenv(SPIN_COUNT, "7")
    spin_briefly()
    assert os.environ[SPIN_COUNT] == "7"
    monkeypatch.delenv(SPIN_COUNT)
    monkeypatch.setenv(WAIT_POLICY, "ACTIVE")
    spin_briefly()
    assert SPIN_COUNT not in os.environ
    monkeypatch.delenv(WAIT_POLICY)
    spin_briefly()
    assert int(os.environ[SPIN_COUNT]) <= 1000
    monkeypatch.delenv(SPIN_COUNT)


def test_small_steps_take_one_thread():
    """Few tokens run on one thread, many on all, and the number is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = StepThreads(on_cpu=True)
        threads.set_for(1)
        assert torch.get_num_threads() == 1
        threads.set_for(100)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
