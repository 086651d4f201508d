"""An engine that slept draws what it drew before, and its memory was really given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_run.cpu_engine import CPUEngine

from tandem.engine.executor.multiproc import MultiprocExecutor
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.engine.loader import open_weights
from tandem.engine.models import load_model
from tandem.engine.worker.sleep_mode import OffloadedWeights, WeightBuffer, lies_on, storages_of
from tandem.memory import page_locked
from tandem.memory.shared import SharedMemory, shared_tensor
from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.errors import TandemError

pytestmark = pytest.mark.full

PROMPTS = [list(range(40, 90)), list(range(200, 233))]
MIB = 1 << 20
SLAB = 192 * MIB


def rss(pid: int | str = "self") -> int:
    """Bytes of a process's memory that are there, by kind of the kernel's own count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmRSS"].split()[0]) * 1024


def call(engine: CPUEngine, name: CommandName, **args: Any) -> Reply:
    return engine.core.call(Command(id=1, name=name, args=args))


def engine_of(folder: Path, **settings: Any) -> CPUEngine:
    """Blocks of 192 MiB over the embedded model."""
    return CPUEngine(folder, kv_cache_memory_bytes=SLAB, max_model_len=512, **settings)


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_memory_falls_and_tokens_stay(smollm2: Path, level: int) -> None:
    """The slab's pages go, at level 2 weights, too; afterwards all tokens are as before."""
    engine = engine_of(smollm2)
    try:
        before = engine.generate(PROMPTS, 12)
        kv_cache = engine.executor.worker.runner.kv_cache.memory  # type: ignore[attr-defined]
        kv_cache.fill_(1)
        engine.core.manager.reset_prefix_cache()
        awake = rss()
        reply = call(engine, CommandName.SLEEP, level=level)
        assert reply.ok, reply.message
        assert reply.values["asleep"] == 1.0
        gc.collect()
        fell = awake - rss()
        weights = 0 if level == 1 else 60 * MIB
        assert fell > SLAB - 4 * MIB + weights, f"{fell / MIB:.0f} MiB"
        assert reply.values["freed_bytes"] > SLAB - 4 * MIB + weights

        woken = call(engine, CommandName.WAKE_UP)
        assert woken.ok, woken.message
        assert not kv_cache[4096:-4096].any(), "pages that were given back are zero"
        assert engine.generate(PROMPTS, 12) == before
        assert not call(engine, CommandName.IS_SLEEPING).values["asleep"]
    finally:
        engine.core.close()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_of_its_own_process_sleeps_too(smollm2: Path, level: int) -> None:
    """The child's memory falls: its shared slab, and its weights."""
    executor = MultiprocExecutor()
    engine = engine_of(smollm2, executor=executor)
    try:
        before = engine.generate(PROMPTS, 8)
        (region,) = executor.regions()
        region.blocks.fill_(1)
        awake, here = rss(executor.pid), rss()
        assert call(engine, CommandName.SLEEP, level=level).ok
        assert here - rss() > SLAB - 4 * MIB, "pages of shared memory go for all who map them"
        assert call(engine, CommandName.WAKE_UP).ok
        assert engine.generate(PROMPTS, 8) == before
        if level == 2:
            assert rss(executor.pid) < awake + 64 * MIB, "the old weights are gone"
    finally:
        engine.core.close()


@pytest.mark.parametrize(
    "made", [UniProcExecutor, pytest.param(MultiprocExecutor, marks=pytest.mark.nightly)]
)
def test_weights_that_are_gone_are_said_to_be(
    smollm2: Path, tmp_path: Path, made: Callable[[], Any]
) -> None:
    """The engine goes on sleeping, and wakes up when they are back."""
    folder = tmp_path / "model"
    folder.mkdir()
    for each in smollm2.iterdir():
        (folder / each.name).symlink_to(each)
    engine = engine_of(folder, executor=made())
    try:
        before = engine.generate(PROMPTS[:1], 4)
        assert call(engine, CommandName.SLEEP, level=2).ok
        (weights,) = folder.glob("*.safetensors")
        weights.rename(folder / "away")
        reply = call(engine, CommandName.WAKE_UP)
        assert not reply.ok
        assert reply.message.startswith("weights could not be taken again: "), reply.message
        assert call(engine, CommandName.IS_SLEEPING).values["asleep"] == 1.0
        (folder / "away").rename(weights)
        assert call(engine, CommandName.WAKE_UP).ok
        assert engine.generate(PROMPTS[:1], 4) == before
    finally:
        engine.core.close()


@pytest.mark.nightly
def test_an_offload_tier_sleeps_and_is_there_again(smollm2: Path) -> None:
    """Its memory goes with the slab's, its blocks are no hit afterwards, then it fills anew."""
    engine = CPUEngine(
        smollm2,
        num_gpu_blocks_override=12,
        max_model_len=128,
        kv_offloading_size=0.05,
        block_size=16,
    )
    try:
        others = [list(range(n, n + 60)) for n in (300, 400, 500, 600)]
        before = engine.generate(PROMPTS[:1], 4)
        engine.generate(others, 4)
        assert engine.core.stats()["offloaded_blocks"]
        reply = call(engine, CommandName.SLEEP)
        assert reply.ok
        assert reply.values["freed_bytes"] > 40 * MIB
        runner = engine.executor.worker.runner  # type: ignore[attr-defined]
        assert runner.host is None
        assert engine.core.stats()["offloaded_blocks"] == engine.core.stats()["cached_blocks"] == 0
        assert call(engine, CommandName.WAKE_UP, tags="weights").values["asleep"] == 1.0
        assert call(engine, CommandName.WAKE_UP, tags="kv_cache").values["asleep"] == 0.0
        engine.generate(others, 4)
        assert engine.generate(PROMPTS[:1], 4) == before
        assert engine.core.stats()["offloaded_blocks"]
    finally:
        engine.core.close()


def test_shared_pages_stay_with_those_who_read_them() -> None:
    """A slab that peers were given is not given back, and nothing of it is lost."""
    tensor = shared_tensor(1 * MIB)
    tensor.fill_(7)
    assert page_locked.give_back(tensor) == MIB
    assert not tensor.any()
    tensor.fill_(7)
    from tandem.memory.shared import descriptor_of

    descriptor, size = descriptor_of(tensor)
    reader = SharedMemory(descriptor, size)
    try:
        with pytest.raises(TandemError, match="shared with other processes"):
            page_locked.give_back(tensor)
        assert bool((tensor == 7).all())
    finally:
        reader.close()


def test_only_whole_pages_of_the_tensor_are_given_back() -> None:
    whole = torch.ones(5 * 4096 + 4096, dtype=torch.uint8)
    part = whole[100:-100]
    given = page_locked.give_back(part)
    assert given % 4096 == 0
    assert bool(whole[:100].all())
    assert bool(whole[-100:].all())
    assert int((whole == 0).sum()) == given


def test_parked_weights_come_back_as_they_were(dense_smollm2: Path) -> None:
    """Every storage of a model is emptied and filled again, in place: what a GPU's rank does."""
    engine = engine_of(dense_smollm2, dtype="bfloat16")  # cast, so that no weight is in the file
    try:
        before = engine.generate(PROMPTS, 6)
        model = engine.executor.worker.runner.model  # type: ignore[attr-defined]
        device = torch.device("cpu")
        sizes = [each.nbytes() for each in storages_of(model, device)]
        assert sum(sizes) > 200 * MIB, "all of the weights are found"
        room = WeightBuffer(None)
        parked = OffloadedWeights(model, device, room)
        assert parked.nbytes == sum(sizes)
        assert room.nbytes < sum(sizes) + 256 * len(sizes), "what they take, and no more"
        assert not list(storages_of(model, device)), "none has memory any more"
        parked.restore()
        assert engine.generate(PROMPTS, 6) == before
    finally:
        engine.core.close()


def test_a_model_reaches_its_weights_and_nothing_else(smollm2: Path) -> None:
    """A tensor of a module is not a model's, whose functions know it all the same."""
    engine = engine_of(smollm2)
    try:
        config = engine.core.config
        with open_weights(config) as weights:
            model = load_model(config.facts, weights)
        found = {each.data_ptr() for each in storages_of(model, torch.device("cpu"))}
        kv_cache = engine.executor.worker.runner.kv_cache.memory  # type: ignore[attr-defined]
        assert found
        assert kv_cache.data_ptr() not in found
    finally:
        engine.core.close()


@pytest.mark.parametrize(
    ("named", "found"), [("cuda", True), ("cuda:0", True), ("cuda:1", False), ("cpu", False)]
)
def test_weights_of_a_device_that_is_named_without_its_number_are_found(
    named: str, found: bool
) -> None:
    """Tensors say which GPU they are on, the setting "cuda" does not: level 1 left all there."""
    assert lies_on(torch.device(named), torch.device("cuda:0")) is found
