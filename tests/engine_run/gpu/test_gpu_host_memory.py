"""Page-locked memory of the host as a GPU's driver has it: of a tier, and of parked weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine_run.gpu.gpu_engine import GPUEngine
from tests.engine_run.tiny_models import folder_of

from tandem.engine.config import EngineConfig
from tandem.engine.step import BlockTransfers
from tandem.engine.worker import offload
from tandem.engine.worker.device_events import moment
from tandem.engine.worker.offload import HostBlocks
from tandem.memory.page_locked import DriverRegistrar, HostMemory, HostMemoryError
from tandem.protocol.commands import Command, CommandName, Reply

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MIB = 1 << 20
GIB = 1 << 30
SLAB = 512 * MIB
PROMPTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate((5, 64, 100))]
LOCKED = 1280 * MIB + 4096
"""The next power of two is 768 MiB more."""


@pytest.fixture
def device() -> torch.device:
    torch.zeros(1, device="cuda")
    return torch.device("cuda", 0)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes that the driver has locked, by address: the driver does it, and it is counted."""
    held: dict[int, int] = {}
    register, unregister = DriverRegistrar.register, DriverRegistrar.unregister

    def count(self: DriverRegistrar, address: int, nbytes: int) -> None:
        register(self, address, nbytes)
        held[address] = nbytes

    def forget(self: DriverRegistrar, address: int) -> None:
        unregister(self, address)
        del held[address]

    monkeypatch.setattr(DriverRegistrar, "register", count)
    monkeypatch.setattr(DriverRegistrar, "unregister", forget)
    return held


def resident() -> int:
    """Bytes of this process that are in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmRSS"].split()[0]) * 1024


def free() -> int:
    """Bytes of the device that nobody has, as its driver says."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def call(engine: GPUEngine, name: CommandName, **args: object) -> Reply:
    return engine.core.call(Command(id=1, name=name, args=args))  # type: ignore[arg-type]


def test_so_much_is_locked_and_no_more(device: torch.device) -> None:
    """It is in memory from the moment it is locked, not rounded up, and gone with ``free``."""
    before = resident()
    memory = HostMemory(LOCKED, DriverRegistrar(device))
    assert memory.tensor.is_pinned()
    took = resident() - before
    assert LOCKED - 16 * MIB <= took <= LOCKED + 128 * MIB, f"{took / MIB:.0f} MiB"
    assert memory.free() == LOCKED
    left = resident() - before
    assert left <= 128 * MIB, f"{left / MIB:.0f} MiB"
    assert HostMemory(MIB, DriverRegistrar(device)).tensor.is_pinned(), "the driver goes on"


def test_copies_both_ways_arrive_and_wait_for_nobody(device: torch.device) -> None:
    """Behind a kernel that is under way, for which a copy of memory that is not locked waits."""
    memory = HostMemory(64 * MIB, DriverRegistrar(device))
    there = torch.randint(0, 255, (64 * MIB,), dtype=torch.uint8, device=device)
    back = torch.empty_like(there)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles of the device
    memory.tensor.copy_(there, non_blocking=True)
    back.copy_(memory.tensor, non_blocking=True)
    end = torch.cuda.Event()
    end.record()
    assert not end.query(), "the host is past both while the device sleeps"
    end.synchronize()
    assert torch.equal(back, there)
    assert torch.equal(memory.tensor, there.cpu())
    memory.free()


def test_memory_that_is_let_go_under_a_copy_is_unlocked_behind_it(device: torch.device) -> None:
    """The device writes no page of somebody else's."""
    memory = HostMemory(64 * MIB, DriverRegistrar(device))
    view = memory.tensor
    there = torch.full((64 * MIB,), 7, dtype=torch.uint8, device=device)
    torch.cuda._sleep(500_000_000)
    view.copy_(there, non_blocking=True)
    memory.free()
    assert bool(view.eq(7).all())


def test_a_tier_of_a_gpu_is_locked_as_it_is(
    device: torch.device, registered: dict[int, int]
) -> None:
    """All of its blocks, and nothing when it is closed."""
    kv_cache = torch.zeros(4, 3 * MIB + 512, dtype=torch.uint8, device=device)
    host = HostBlocks(kv_cache, 5)
    assert host.blocks.is_pinned()
    assert list(registered.values()) == [5 * (3 * MIB + 512)]
    host.close()
    assert not registered


def test_a_step_goes_on_beside_stores_of_blocks_that_it_leaves_alone(
    device: torch.device,
) -> None:
    """Though they are held up; what it writes is stored before, and a later step waits for its own.
    The host has what was there each time."""
    count, size = 200, MIB + 512
    kv_cache = torch.randint(0, 255, (count, size), dtype=torch.uint8, device=device)
    want = kv_cache.cpu().flip(0)
    host = HostBlocks(kv_cache, count)
    stores = BlockTransfers(tuple((block, count - 1 - block) for block in range(count)))
    with torch.cuda.stream(host._queue._stores):
        torch.cuda._sleep(2_000_000_000)  # cycles of the device
    stored = host.begin(stores, frozenset({count - 1}))
    kv_cache[count - 1].zero_()
    moment(device).wait()
    assert stored is not None
    assert not stored.done(), "the step is through before what goes on beside it"
    assert host.is_storing
    assert host.begin(BlockTransfers(), frozenset(range(40, 45))) is stored
    kv_cache[40:45].zero_()
    torch.cuda.synchronize()
    assert stored.done()
    assert not host.is_storing
    assert torch.equal(host.blocks, want)
    host.close()


@pytest.mark.parametrize("level", [1, 2])
def test_a_tier_sleeps_and_weights_are_locked_once(registered: dict[int, int], level: int) -> None:
    """A tier is unlocked while its rank sleeps; level 1 locks what the weights take and keeps it,
    level 2 nothing. All is unlocked at the end, and tokens are as before."""
    folder = folder_of("qwen3", wide=True)
    size = EngineConfig.of(folder, device="cuda", dtype="bfloat16").layout.block_bytes
    engine = GPUEngine(
        folder,
        dtype="bfloat16",
        kv_cache_memory_bytes=SLAB,
        kv_offloading_size=(5.5 * size) / GIB,
    )
    tier = 5 * size
    assert list(registered.values()) == [tier]
    before = engine.generate(PROMPTS, 12)
    addresses = set()
    for _ in range(2):
        asleep = call(engine, CommandName.SLEEP, level=level)
        assert asleep.ok, asleep.message
        assert tier not in registered.values()
        assert len(registered) == (1 if level == 1 else 0)
        addresses |= set(registered)
        woken = call(engine, CommandName.WAKE_UP)
        assert woken.ok, woken.message
        assert tier in registered.values()
        assert engine.generate(PROMPTS, 12) == before
    assert len(addresses) <= 1, "locked once"
    engine.core.close()
    assert not registered


def test_a_wake_that_failed_at_the_tier_succeeds_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slab that was taken before it failed is taken once."""
    folder = folder_of("qwen3", wide=True)
    size = EngineConfig.of(folder, device="cuda", dtype="bfloat16").layout.block_bytes
    settings = {"kv_cache_memory_bytes": SLAB, "kv_offloading_size": (5.5 * size) / GIB}
    engine = GPUEngine(folder, dtype="bfloat16", **settings)
    before, awake = engine.generate(PROMPTS, 12), free()

    def short(*_: object) -> HostBlocks:
        raise HostMemoryError("no room")

    assert call(engine, CommandName.SLEEP).ok
    with monkeypatch.context() as full:
        full.setattr("tandem.engine.worker.sleep_mode.open_medium", short)
        for _ in range(2):
            reply = call(engine, CommandName.WAKE_UP)
            assert not reply.ok
            assert "no room" in reply.message
    woken = call(engine, CommandName.WAKE_UP)
    assert woken.ok, woken.message
    assert free() >= awake - (64 << 20), "no second slab"
    assert engine.generate(PROMPTS, 12) == before
    engine.core.close()


def test_a_tier_that_cannot_be_locked_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    first = HostMemory(MIB, DriverRegistrar(device))

    class Twice(DriverRegistrar):
        def register(self, address: int, nbytes: int) -> None:
            super().register(first.tensor.data_ptr(), nbytes)

    monkeypatch.setattr(offload, "registrar_for", Twice)
    kv_cache = torch.zeros(4, MIB, dtype=torch.uint8, device=device)
    with pytest.raises(HostMemoryError, match="cannot be page-locked: cuMemHostRegister_v2 failed"):
        HostBlocks(kv_cache, 1)
    first.free()
