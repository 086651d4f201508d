"""Prompts that come as embeddings, on a GPU: tokens as of the ids whose rows they are."""

from __future__ import annotations

import pytest
import torch
from tests.engine_run.embedded import embeds_for
from tests.engine_run.gpu.gpu_engine import ROUTER, GPUEngine
from tests.engine_run.tiny_models import folder_of

from tandem.protocol.embeds import PLACEHOLDER
from tandem.protocol.ids import RequestKey
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(70 + each)] for each in range(4)]
SMALL = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 96, "max_num_seqs": 8}


FOLDER = folder_of("llama", wide=True)


def add_embeds(engine: GPUEngine, name: str, prompt: list[int], count: int) -> str:
    """A request for ``count`` tokens behind the rows of ``prompt``; its name."""
    embeds = embeds_for(FOLDER, prompt, torch.float32)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=count, ignore_eos=True)
    request = EngineCoreRequest(
        key=RequestKey(ROUTER, name, 0),
        prompt_token_ids=[PLACEHOLDER] * len(prompt),
        params=params,
        prompt_embeds=embeds,
    )
    refusal = engine.core.add(request)
    assert refusal is None, refusal
    return name


@pytest.mark.parametrize("caching", [False, True])
def test_the_tables_rows_give_the_tokens_of_ids(caching: bool) -> None:
    """In chunks of graphs, beside prompts of ids and their decodes; again from the prefix cache if
    there is one."""
    settings = {"dtype": "float32", "enable_prefix_caching": caching, **SMALL}
    engine = GPUEngine(FOLDER, enable_prompt_embeds=True, **settings)
    want = engine.generate(PROMPTS, 12)
    for turn in range(2):
        names = [
            add_embeds(engine, f"e{turn}{index}", prompt, 12)
            if index != 1
            else engine.add(prompt, 12)
            for index, prompt in enumerate(PROMPTS)
        ]
        made = engine.run()
        assert [made[name] for name in names] == want
    engine.core.check_integrity()
