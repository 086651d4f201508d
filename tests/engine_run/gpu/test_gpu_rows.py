"""Rows of several tokens in CUDA graphs, against steps of one token."""

import json

import pytest
import torch
from tests.engine_run.gpu.gpu_engine import GPUEngine

from tandem.protocol.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 7,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
TOKENS = 96
PROMPTS = [[(11 * each + 7 * at) % 900 + 5 for at in range(30 + 9 * each)] * 2 for each in range(6)]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0, seed=0), SamplingParams(temperature=0.7, top_p=0.9, seed=5)],
    ids=["greedy", "seeded"],
)
def test_rows_in_graphs_draw_the_tokens_of_single_steps(smollm2, params, monkeypatch):
    """float32 leaves no ties. Drafts by lookup, and whole steps replayed from the wide classes."""
    settings = {"dtype": "float32", "max_num_seqs": 64, "gpu_memory_utilization": 0.25}
    plain = GPUEngine(smollm2, **settings).generate(PROMPTS, TOKENS, params)
    made = GPUEngine(smollm2, **settings, speculative_config=json.dumps(LOOKUP))
    graphs, shapes = made.runner.graphs, []
    replay = graphs.replay

    def noted(shape):
        shapes.append(shape)
        return replay(shape)

    monkeypatch.setattr(graphs, "replay", noted)
    assert made.generate(PROMPTS, TOKENS, params) == plain
    assert any(each.width for each in shapes)
