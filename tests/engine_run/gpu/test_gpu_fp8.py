"""An fp8 checkpoint on a GPU: chunks, graphs and decodes over the Triton kernel, in 16 bits."""

import pytest
import torch
from tests.engine_run.fp8_models import fp8_folders
from tests.engine_run.gpu.gpu_engine import GPUEngine, regrets
from tests.engine_run.gpu.test_gpu_families import PROMPTS, SMALL
from tests.engine_run.tiny_models import class_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FP8_CLOSE = 0.15
"""Share of the best logit that rounded activations may lose in a model of a few random layers."""


@pytest.mark.parametrize("name", ["llama-untied-biased", "qwen3"])
@pytest.mark.parametrize("eager", [False, True])
def test_fp8_draws_the_best_token(name, eager):
    """Token by token the best one of the scaled weights, or nearly, with graphs and without."""
    held, meant = fp8_folders(name, wide=True)
    engine = GPUEngine(held, dtype="bfloat16", enforce_eager=eager, **SMALL)
    made = engine.generate(PROMPTS, 24)
    judge = class_of(name).from_pretrained(meant, dtype=torch.float32).eval()
    scale = judge(torch.tensor([PROMPTS[3]])).logits.abs().amax().item()
    worst = max(max(regrets(judge, p, t)) for p, t in zip(PROMPTS, made, strict=True))
    assert worst < FP8_CLOSE * scale
