"""Prompts of all lengths around the graphs' classes, judged by transformers in float32."""

import pytest
import torch
from reference import rows
from tests.engine_run.gpu.gpu_engine import GPUEngine, regrets

from tandem.engine.worker.graphs import StepGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTHS = (512, 513, 640, 641, 1000, 1024, 1407, 1500, 2047, 2048, 2049, 3000)
CLOSE = 0.1
"""Of the best logit, what float16 may lose: near ties of this model are told in bfloat16 by 0.2."""


def text(length: int, first: int) -> list[int]:
    """The reference's prompts and answers one after the other, from one of them on."""
    ids: list[int] = []
    for row in (*rows()[first:], *rows()):
        ids += (*row.prompt, *row.tokens)
    return ids[:length]


class Counted(StepGraphs):
    """An engine's graphs, and the tokens of those that were replayed."""

    def __init__(self, others: StepGraphs) -> None:
        self.__dict__.update(others.__dict__)
        self.replayed: list[int] = []

    def replay(self, shape):
        self.replayed.append(shape.tokens)
        return super().replay(shape)


@pytest.mark.timeout(200)
def test_prompts_of_all_lengths_draw_the_best_token(smollm2, dense_smollm2):
    """Alone, two in a step, and again with what is cached of them: padded to a graph or too long
    for one."""
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(dense_smollm2, dtype=torch.float32).cuda().eval()
    engine = GPUEngine(smollm2, dtype="float16", max_model_len=4096, num_gpu_blocks_override=400)
    graphs = engine.runner.graphs = Counted(engine.runner.graphs)
    prompts = [text(length, number) for number, length in enumerate(LENGTHS)]
    made = [engine.generate([prompt], 6)[0] for prompt in prompts]
    assert {640, 768, 1024, 1408, 1536, 2048} <= set(graphs.replayed)
    engine.core.manager.reset_prefix_cache()
    pairs = [(600, 900), (1023, 1025), (513, 30)]
    for pair in pairs:
        both = [text(length, 20 + number) for number, length in enumerate(pair)]
        prompts += both
        made += engine.generate(both, 6)
    longer = [text(1024, 40), text(1900, 40)]
    prompts += longer
    made += [engine.generate([prompt], 6)[0] for prompt in longer]  # 1,024 of the second are cached
    assert 896 in graphs.replayed
    worst = [max(regrets(judge, p, t)) for p, t in zip(prompts, made, strict=True)]
    print("regrets", [round(each, 4) for each in worst])
    assert max(worst) < CLOSE
