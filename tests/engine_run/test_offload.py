"""Blocks in host memory: bytes that go and come back, and tokens that are as if they never left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from reference import judge, rows
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.tiny_models import folder_of, judged

from tandem.engine.config import EngineConfig
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.step import BlockLoad, BlockTransfers, TransferReport
from tandem.engine.worker import medium
from tandem.engine.worker.launched import LaunchedStep
from tandem.engine.worker.offload import HostBlocks
from tandem.protocol.errors import InvalidParameter

pytestmark = pytest.mark.full

GIB = 2**30
BYTES = EngineConfig.of(folder_of("llama"), device="cpu").layout.block_bytes
PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(90)] for each in range(6)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """OpenMP's threads wait for each other by spinning, which on a busy machine takes for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine(num_cpu_blocks: int = 60, num_blocks: int = 16, **settings) -> CPUEngine:
    """The tiny Llama with room for two and a half prompts, and host memory behind it."""
    return CPUEngine(
        folder_of("llama"),
        num_gpu_blocks_override=num_blocks,
        kv_offloading_size=num_cpu_blocks * BYTES / GIB,
        **settings,
    )


def offloaded(made: CPUEngine):
    tier = made.core._offload
    assert tier is not None
    return tier.stats


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_smollm2_draws_the_reference_tokens_over_a_tiny_cache(smollm2):
    """Prompts that push each other out of a cache of 256 tokens, asked twice: transformers' tokens
    both times, the second time from host memory as far as whole blocks go."""
    made = CPUEngine(
        smollm2,
        num_gpu_blocks_override=16,
        kv_offloading_size=0.2,
        max_num_seqs=3,
        max_num_batched_tokens=101,
        async_scheduling=True,
    )
    picked = [i for i, row in enumerate(rows()) if 40 < len(row.prompt) < 130][::3]
    for _ in range(2):
        got = made.generate([rows()[i].prompt for i in picked], 4)
        cut = {i: [*tokens, *rows()[i].tokens[4:]] for i, tokens in zip(picked, got, strict=True)}
        wrong, _ = judge(cut)
        assert wrong == []
    stats = offloaded(made)
    again = sum((len(rows()[i].prompt) - 1) // 16 * 16 for i in picked)
    assert stats.hit_tokens > again / 2
    assert stats.num_stored * 16 >= stats.hit_tokens
    made.core.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seats", [1, 8])
def test_tokens_are_those_of_a_model_that_computes_all(overlap, seats):
    """Many rounds over a cache that holds a fraction: evictions, loads and preemptions at once."""
    made = engine(max_num_seqs=seats, max_num_batched_tokens=48, async_scheduling=overlap)
    want = [judged("llama", prompt, 12)[0] for prompt in PROMPTS]
    for _ in range(3):
        assert made.generate(PROMPTS, 12) == want
    assert offloaded(made).hit_tokens >= 2 * 5 * 80
    made.core.check_integrity()


def test_a_load_that_fails_is_computed(monkeypatch, caplog):
    """Host memory that cannot be read costs time and no token, and is not asked again for it."""
    made = engine()
    want = made.generate(PROMPTS, 6)
    with monkeypatch.context() as broken:
        broken.setattr(HostBlocks, "_fill", lambda self, load: "the memory is broken")
        assert made.generate(PROMPTS[:2], 6) == want[:2]
    stats = offloaded(made)
    assert (stats.num_failed_loads, stats.hit_tokens) == (2, 0)
    assert "did not come back from host memory: the memory is broken" in caplog.text
    made.core.check_integrity()


def test_a_copy_that_is_refused_fails_its_load_alone():
    """The rank says why, in the order of tickets, and goes on."""
    host = HostBlocks(torch.zeros(4, 3, dtype=torch.uint8), 2)
    whole, host.blocks = host.blocks, host.blocks[:, :-1]
    host.begin(BlockTransfers(loads=(BlockLoad(1, ((0, 0),)),)), frozenset())
    host.blocks = whole
    host.begin(BlockTransfers(loads=(BlockLoad(2, ((0, 0),)),)), frozenset())
    report = host.report(wait=True)
    assert report is not None
    assert report.loaded == (2,)
    ((ticket, why),) = report.failed
    assert ticket == 1
    assert "must match the size" in why


def test_stores_come_before_loads_and_before_what_the_step_writes():
    """One step's transfers over one host block: what was in the cache comes back elsewhere."""
    kv_cache = torch.arange(12, dtype=torch.uint8).view(4, 3)
    host = HostBlocks(kv_cache, 2)
    load = BlockLoad(7, ((1, 0), (0, 2)))
    host.begin(BlockTransfers(stores=((3, 1), (1, 0)), loads=(load,)), frozenset())
    kv_cache[3] = 0
    assert kv_cache.tolist() == [[9, 10, 11], [3, 4, 5], [3, 4, 5], [0, 0, 0]]
    assert host.report(wait=False) == TransferReport(loaded=(7,))
    assert host.report(wait=True) is None


class Later:
    """A point in a device's queue that is reached when somebody waits for it."""

    def __init__(self) -> None:
        self.reached = False

    def done(self) -> bool:
        return self.reached

    def wait(self, seconds: float = 1.0) -> None:
        self.reached = True


def test_only_a_step_for_transfers_waits_for_loads():
    """A step that computes tells of loads that have landed, in order; one that is there for
    transfers alone waits for all."""
    host = HostBlocks(torch.zeros(4, 3, dtype=torch.uint8), 2)
    first, second = Later(), Later()
    host._under_way += [(1, first, None), (2, second, "why")]
    computes = LaunchedStep(1, host=host)
    assert computes.result().transfers is None
    second.reached = True
    assert computes.result().transfers is None
    first.reached = True
    assert computes.result().transfers == TransferReport((1,), ((2, "why"),))
    host._under_way.append((3, Later(), None))
    alone = LaunchedStep(2, host=host, for_transfers=True)
    assert alone.result().transfers == TransferReport((3,))


@pytest.mark.parametrize(
    ("gib", "allowed"), [(1e-9, "at least one block"), (2.0**19, "the memory that .+ has left")]
)
def test_a_size_that_cannot_be_had_is_refused(gib, allowed):
    """Not one block, or more than there is: the field, the value and what would do."""
    config = EngineConfig.of(folder_of("llama"), device="cpu", kv_offloading_size=gib)
    with pytest.raises(InvalidParameter, match=f"kv_offloading_size.*{allowed}"):
        medium.num_cpu_blocks(config, config.layout)


def test_without_a_size_there_is_no_tier():
    """No host memory, nothing in any plan, no word in a result."""
    made = CPUEngine(folder_of("llama"), num_gpu_blocks_override=16)
    assert isinstance(made.executor, UniProcExecutor)
    assert made.executor.worker.runner.host is None
    assert made.core.capacity.num_cpu_blocks == 0
    assert made.core._offload is None
    assert made.core.manager.pool.on_evict is None
