"""SmolLM2 in bfloat16 on a GPU against transformers there, over the 64 reference prompts."""

import pytest
import torch
from reference import rows
from tests.engine_run.gpu.gpu_engine import GPUEngine, regrets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GAP = 0.05
"""Where the two part, the two best logits may differ by so much."""
TOKENS = 32


@pytest.mark.timeout(300)
def test_smollm2_draws_what_transformers_draws(smollm2):
    """Every token is the best one given those before it, or within GAP of it."""
    from transformers import AutoModelForCausalLM

    engine = GPUEngine(smollm2, dtype="bfloat16", max_num_seqs=64, gpu_memory_utilization=0.3)
    prompts = [row.prompt for row in rows()]
    made = engine.generate(prompts, TOKENS)
    judge = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).cuda().eval()
    parted = {}
    for index, (prompt, tokens) in enumerate(zip(prompts, made, strict=True)):
        lost = [each for each in regrets(judge, prompt, tokens) if each > 0]
        if lost:
            parted[index] = max(lost)
    print(f"{len(prompts) - len(parted)} of {len(prompts)} equal; parted: {parted}")
    assert all(each < GAP for each in parted.values()), parted
