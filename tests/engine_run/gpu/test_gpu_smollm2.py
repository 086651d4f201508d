"""SmolLM2 in bfloat16 on a GPU against the tokens that transformers drew in float32."""

import pytest
import torch
from reference import rows
from tests.engine_run.gpu.gpu_engine import GPUEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NEAR, FAR = 0.05, 0.2
"""Where the two part, the reference's two best logits differ by less than the first, in a few
places by less than the second. (transformers itself in bfloat16 parts in 24 answers, in seven of
them where the best two differ by 0.066 to 0.72.)"""
FEW = 3
TOKENS = 32


def partings(made):
    """Where answers leave the reference: row, position, gap of the two best logits there."""
    found = []
    for index, (row, tokens) in enumerate(zip(rows(), made, strict=True)):
        pairs = enumerate(zip(tokens, row.tokens, strict=False))
        at = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
        if at is not None:
            found.append((index, at, row.gaps[at]))
    return found


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
@pytest.mark.timeout(300)
def test_smollm2_draws_the_reference_tokens(smollm2, together):
    """The 64 answers are the reference's, or leave it where two tokens nearly tie."""
    engine = GPUEngine(smollm2, dtype="bfloat16", max_num_seqs=64, gpu_memory_utilization=0.3)
    prompts = [row.prompt for row in rows()]
    if together:
        made = engine.generate(prompts, TOKENS)
    else:
        made = [engine.generate([prompt], TOKENS)[0] for prompt in prompts]
    found = partings(made)
    print(f"{len(prompts) - len(found)} of {len(prompts)} equal; parted: {found}")
    gaps = [gap for _, _, gap in found]
    assert max(gaps, default=0.0) < FAR, found
    assert sum(gap >= NEAR for gap in gaps) <= FEW, found
    assert len(found) < 20, found
