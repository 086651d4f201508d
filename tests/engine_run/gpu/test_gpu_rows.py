"""Rows of several tokens in CUDA graphs, against steps of one token."""

import json

import pytest
import torch
from tests.engine_run.gpu.gpu_engine import GPUEngine
from tests.engine_run.gpu.test_gpu_families import SMALL
from tests.engine_run.tiny_models import folder_of

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
PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(30 + 9 * each)] * 2 for each in range(6)]
SETTINGS = {**SMALL, "num_gpu_blocks_override": 192, "dtype": "float32"}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, seed=0),
    "seeded": SamplingParams(temperature=0.7, top_p=0.9, seed=5),
    "ruled": SamplingParams(
        temperature=0.2, seed=5, frequency_penalty=0.2, min_tokens=40, stop_token_ids=(9,)
    ),
}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_rows_in_graphs_draw_the_tokens_of_single_steps(params, name, monkeypatch):
    """float32 leaves no ties. Drafts by lookup, two steps in flight, in graphs of wide classes."""
    folder = folder_of(name, wide=True)
    plain = GPUEngine(folder, **SETTINGS).generate(PROMPTS, TOKENS, params)
    made = GPUEngine(folder, **SETTINGS, speculative_config=json.dumps(LOOKUP))
    graphs, shapes = made.runner.graphs, []
    replay = graphs.replay

    def noted(shape):
        shapes.append(shape)
        return replay(shape)

    monkeypatch.setattr(graphs, "replay", noted)
    assert made.generate(PROMPTS, TOKENS, params) == plain
    assert any(each.width for each in shapes)
