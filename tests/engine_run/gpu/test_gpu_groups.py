"""Windows, Gemma 3 and recurrent states on a GPU: graphs, overlap, 16 bits, and op by op."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.engine_run.gpu.gpu_engine import GPUEngine, regrets
from tests.engine_run.gpu.test_gpu_families import CLOSE, PROMPTS, SMALL
from tests.engine_run.test_gated_delta import CONV, SHAPE, inputs, pages_of_nan
from tests.engine_run.tiny_models import GEMMAS, HYBRIDS, WINDOWED, folder_of, judge_of

from tandem.kernels.gated_delta import Spans, gated_delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROOM = {**SMALL, "num_gpu_blocks_override": 192}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*WINDOWED, *GEMMAS, *HYBRIDS])
def test_families_draw_the_best_token(name, dtype):
    engine = GPUEngine(folder_of(name, wide=True), dtype=dtype, **ROOM)
    made = engine.generate(PROMPTS, 24)
    judge = judge_of(name, wide=True)
    scale = judge(torch.tensor([PROMPTS[3]])).logits.abs().amax().item()
    worst = max(max(regrets(judge, p, t)) for p, t in zip(PROMPTS, made, strict=True))
    rounded, noise = copy.deepcopy(judge).to(getattr(torch, dtype)), 0.0
    for prompt, tokens in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        noise = max(noise, (rounded(ids).logits.float() - judge(ids).logits).abs().max().item())
    print(f"{name} {dtype}: worst regret {worst:.4f}, transformers' error {noise:.4f}")
    assert worst < max(CLOSE * scale, 2 * noise)  # two logits are off by as much as the type's


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_graphs_change_no_token(name):
    folder = folder_of(name, wide=True)
    found = [
        GPUEngine(folder, dtype="bfloat16", **{**ROOM, **settings}).generate(PROMPTS, 16)
        for settings in ({}, {"enforce_eager": True}, {"async_scheduling": False})
    ]
    assert found[2] == found[0]
    same = sum(a == b for a, b in zip(found[1], found[0], strict=True))
    assert same >= len(PROMPTS) - 1  # padding may change how a product is cut, and so the last bit


def test_the_delta_rule_is_that_of_a_cpu():
    bounds, lens = torch.tensor([0, 130, 132]).int(), torch.tensor([1, 130, 2]).int()
    blocks, found = torch.tensor([4, 1, 7]).int(), []
    for device in ("cpu", "cuda"):
        pages = pages_of_nan().to(device)
        spans = Spans.of(1, bounds.to(device), lens.to(device), 130)
        qkv, decay, beta = (each.to(device) for each in inputs(133))
        conv, where = CONV.to(device), blocks.to(device)
        out = gated_delta(qkv, decay, beta, conv, pages, where, spans, SHAPE)
        found.append((out, pages[[1, 4, 7]]))
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-3)
