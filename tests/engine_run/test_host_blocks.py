"""A tier's memory in the host, and that of parked weights: how much is locked, and how long.

On a CPU nothing need be locked: a registrar counts what a GPU's driver would lock.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.tiny_models import folder_of
from tests.kernels.locking import Locks

from tandem.engine.config import EngineConfig
from tandem.engine.worker import offload, sleep_mode
from tandem.engine.worker.offload import Available, HostBlocks
from tandem.engine.worker.sleep_mode import OffloadedWeights, WeightBuffer
from tandem.memory import page_locked
from tandem.memory.page_locked import HostMemoryError
from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.errors import InvalidParameter

GIB = 2**30
BYTES = EngineConfig.of(folder_of("llama"), device="cpu").layout.block_bytes
PROMPT = [(7 * at) % 300 + 5 for at in range(40)]
TIER = 37
"""Blocks: no power of two of bytes."""


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    found = Locks()
    monkeypatch.setattr(offload, "registrar_for", lambda _device: found)
    return found


@pytest.fixture
def engine(locks: Locks) -> Iterator[CPUEngine]:
    size = (TIER + 0.5) * BYTES / GIB
    made = CPUEngine(folder_of("llama"), num_gpu_blocks_override=16, kv_offloading_size=size)
    yield made
    made.core.close()


def call(engine: CPUEngine, name: CommandName, **args: object) -> Reply:
    return engine.core.call(Command(id=1, name=name, args=args))  # type: ignore[arg-type]


def test_a_tier_locks_its_blocks_and_no_more(locks: Locks) -> None:
    """Rows of one range, until it is closed."""
    kv_cache = torch.arange(12, dtype=torch.uint8).view(4, 3)
    host = HostBlocks(kv_cache, 11)
    assert host.blocks.shape == (11, 3)
    assert locks.held == {host.blocks.data_ptr(): 33}
    assert host.close() == 33
    assert not locks.held
    assert len(host.blocks) == 0


@pytest.mark.parametrize("level", [1, 2])
def test_a_tier_that_sleeps_is_unlocked(engine: CPUEngine, locks: Locks, level: int) -> None:
    """What is said to be given back is; it is locked again with the KV, and unlocked at the end."""
    before = engine.generate([PROMPT], 4)
    assert list(locks.held.values()) == [TIER * BYTES]
    reply = call(engine, CommandName.SLEEP, level=level)
    assert reply.values["freed_bytes"] >= TIER * BYTES
    assert not locks.held
    assert call(engine, CommandName.WAKE_UP, tags="weights").ok
    assert not locks.held
    assert call(engine, CommandName.WAKE_UP, tags="kv_cache").ok
    assert list(locks.held.values()) == [TIER * BYTES]
    assert engine.generate([PROMPT], 4) == before
    engine.core.close()
    assert not locks.held


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_what_woke_up_sleeps_again(
    engine: CPUEngine, locks: Locks, level: int, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back once more, and nothing else is touched; all comes again."""
    before = engine.generate([PROMPT], 4)
    runner = engine.executor.worker.runner  # type: ignore[attr-defined]
    assert call(engine, CommandName.SLEEP, level=level).ok
    assert call(engine, CommandName.WAKE_UP, tags=tag).ok
    give_back, given = page_locked.give_back, list[int]()

    def noted(kv_cache: torch.Tensor) -> int:
        given.append(give_back(kv_cache))
        return given[-1]

    with monkeypatch.context() as looked:
        looked.setattr(page_locked, "give_back", noted)
        assert call(engine, CommandName.SLEEP, level=level).ok
    assert bool(given) == (tag == "kv_cache")
    assert not locks.held
    assert hasattr(runner, "model") == (level == 1)
    assert call(engine, CommandName.WAKE_UP).ok
    assert list(locks.held.values()) == [TIER * BYTES]
    assert engine.generate([PROMPT], 4) == before


def test_a_wake_that_fails_at_the_tier_succeeds_later(
    engine: CPUEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory that others have meanwhile is a clear answer, and the engine sleeps on."""
    before = engine.generate([PROMPT], 4)
    assert call(engine, CommandName.SLEEP).ok
    with monkeypatch.context() as full:
        full.setattr(offload, "registrar_for", lambda _device: Locks(most=0))
        reply = call(engine, CommandName.WAKE_UP)
    assert not reply.ok
    assert "kv_cache could not be taken again: " in reply.message
    assert "cannot be page-locked: no more is locked" in reply.message
    assert call(engine, CommandName.IS_SLEEPING).values["asleep"] == 1.0
    assert call(engine, CommandName.WAKE_UP).ok
    assert engine.generate([PROMPT], 4) == before


def test_parked_weights_share_one_range_that_is_kept() -> None:
    """As large as they are, each tensor aligned; the next time nothing is locked."""
    locks, cpu = Locks(), torch.device("cpu")
    model = {"a": torch.arange(1000.0), "b": torch.arange(7), "c": torch.arange(300.0)}
    want = {name: each.clone() for name, each in model.items()}
    room = WeightBuffer(locks)
    for _ in range(2):
        parked = OffloadedWeights(model, cpu, room)
        assert parked.nbytes == sum(each.nbytes for each in want.values())
        assert list(locks.held.values()) == [4096 + 256 + 1280]
        assert all(not each.untyped_storage().nbytes() for each in model.values())
        parked.restore()
        assert all(torch.equal(model[name], each) for name, each in want.items())
    assert not locks.unlocked
    room.free()
    assert not locks.held


def test_weights_that_find_no_room_stay_where_they_are() -> None:
    model = [torch.arange(1000.0), torch.arange(7)]
    with pytest.raises(HostMemoryError, match="cannot be page-locked"):
        OffloadedWeights(model, torch.device("cpu"), WeightBuffer(Locks(most=100)))
    assert torch.equal(model[0], torch.arange(1000.0))


def test_weights_that_find_no_room_again_stay_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """None takes a device's memory, and they come back when there is some."""
    model = [torch.arange(1000.0), torch.arange(7)]
    parked = OffloadedWeights(model, torch.device("cpu"), WeightBuffer(None))

    def short(_storage: torch.UntypedStorage) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as full:
        full.setattr("tandem.engine.worker.sleep_mode._bytes", short)
        with pytest.raises(RuntimeError, match="out of memory"):
            parked.restore()
    assert all(not each.untyped_storage().nbytes() for each in model)
    parked.restore()
    assert torch.equal(model[0], torch.arange(1000.0))


def test_weights_are_not_parked_beyond_what_a_pod_may_have(
    engine: CPUEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be killed; level 2 keeps nothing in the host."""
    own = engine.executor.worker.rest  # type: ignore[attr-defined]
    own._check_room()
    monkeypatch.setattr(sleep_mode, "available", lambda: Available(0, "the cgroup of 1.0 GiB"))
    with pytest.raises(InvalidParameter, match=r"level: 1 .*2: weights.*the cgroup of 1.0 GiB has"):
        own._check_room()
