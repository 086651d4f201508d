"""Packed checkpoints on a GPU: chunks, graphs and decodes over the Triton kernels, in 16 bits."""

import pytest
import torch
from tests.engine_run.form_models import form_folders, model_of, to_e4m3, to_int8
from tests.engine_run.gpu.gpu_engine import GPUEngine, regrets
from tests.engine_run.gpu.test_gpu_families import PROMPTS, SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NAME = "llama-untied-biased"
FORMS = {
    "gptq-v2-ordered": (0.05, None),
    "awq": (0.05, None),
    "packed-8": (0.05, None),
    "int8": (0.1, to_int8),
    "float-channel": (0.15, to_e4m3),
    "nvfp4": (0.15, None),
}
"""Share of the best logit that may be lost in a model of a few random layers, and the rounding of
activations in the model that judges."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eager", [False, True])
def test_a_form_draws_the_best_token(form, eager):
    """Token by token the best one of the weights that the tensors stand for, or nearly."""
    held, meant = form_folders(form, NAME)
    engine = GPUEngine(held, dtype="bfloat16", enforce_eager=eager, **SMALL)
    made = engine.generate(PROMPTS, 24)
    close, rounds = FORMS[form]
    judge = model_of(meant, NAME, rounds)
    scale = judge(torch.tensor([PROMPTS[3]])).logits.abs().amax().item()
    worst = max(max(regrets(judge, p, t)) for p, t in zip(PROMPTS, made, strict=True))
    print(f"{form}: worst regret {worst:.4f} of logits up to {scale:.1f}")
    assert worst < close * scale
