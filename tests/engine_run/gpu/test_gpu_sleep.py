"""A GPU's engine that sleeps: its memory is free for others, and its tokens are as before."""

from __future__ import annotations

import pytest
import torch
from tests.engine_run.gpu.gpu_engine import GPUEngine
from tests.engine_run.tiny_models import folder_of

from tandem.engine.worker.sleep_mode import weight_bytes
from tandem.protocol.commands import Command, CommandName

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate((5, 64, 100))]
SLAB = 512 << 20


def free() -> int:
    """Bytes of the device that nobody has, as its driver says."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_tokens_stay(level):
    """At either level the slab and every weight go; what comes again draws the same."""
    settings = {"kv_cache_memory_bytes": SLAB, "enable_prefix_caching": False}
    engine = GPUEngine(folder_of("qwen3", wide=True), dtype="bfloat16", **settings)
    before = engine.generate(PROMPTS, 12)
    weights = weight_bytes(engine.runner.model, torch.device("cuda"))
    assert weights > 100_000
    torch.cuda.empty_cache()  # what start-up left in torch's cache goes with sleep and stays away
    held, awake = torch.cuda.memory_allocated(), free()
    asleep = engine.core.call(Command(id=1, name=CommandName.SLEEP, args={"level": level}))
    assert asleep.ok, asleep.message
    assert asleep.values["freed_bytes"] >= SLAB - (4 << 20) + weights
    assert free() - awake >= SLAB - (4 << 20), "the driver has the slab"
    assert held - torch.cuda.memory_allocated() >= weights, "torch has the weights"
    woken = engine.core.call(Command(id=2, name=CommandName.WAKE_UP))
    assert woken.ok, woken.message
    assert free() <= awake + (64 << 20), "it is taken again"
    assert engine.generate(PROMPTS, 12) == before
