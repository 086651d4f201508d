"""The overlapped engine on a GPU under arrivals, cancels and too few blocks."""

import random

import pytest
import torch
from tests.engine_run.gpu.gpu_engine import GREEDY, ROUTER, GPUEngine, regrets
from tests.engine_run.tiny_models import folder_of, judge_of

from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CLOSE = 0.02


@pytest.mark.parametrize("overlap", [True, False])
def test_no_token_is_wrong_under_pressure(overlap):
    """Arrivals, cancels, blocks for a few: every token is the best one, and no block leaks."""
    rng = random.Random(3)
    engine = GPUEngine(
        folder_of("qwen3", wide=True),
        dtype="float16",
        num_gpu_blocks_override=24,
        max_num_batched_tokens=128,
        max_num_seqs=16,
        async_scheduling=overlap,
    )
    prompts: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    made: dict[str, list[int]] = {}
    while len(prompts) < 150 or engine.core.has_work:
        if len(prompts) < 150 and rng.random() < 0.5:
            prompt = [rng.randrange(5, 300) for _ in range(rng.randrange(1, 200))]
            drawn = rng.random() < 0.2
            params = SamplingParams(temperature=0.7, seed=1) if drawn else GREEDY
            name = engine.add(prompt, rng.randrange(1, 60), params)
            prompts[name] = prompt
            if drawn:
                cancelled.add(name)  # its tokens need not be the best ones
        if prompts and rng.random() < 0.05:
            name = rng.choice(list(prompts))
            if engine.core.abort(RequestKey(ROUTER, name, 0)):
                cancelled.add(name)
        for outputs in engine.core.step().outputs.values():
            for each in outputs:
                assert isinstance(each, EngineCoreOutput)
                made.setdefault(each.request, []).extend(each.token_ids)
    judge = judge_of("qwen3", wide=True)
    whole = [name for name in prompts if name not in cancelled]
    worst = max(max(regrets(judge, prompts[name], made[name])) for name in whole)
    assert len(whole) > 80
    assert worst < CLOSE * 8
    assert engine.core.stats()["free_blocks"] == 24
    assert engine.core.scheduler.request_table.stats.preemptions >= 0
    engine.core.check_integrity()
