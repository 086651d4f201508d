"""Encoders on a GPU: every family in 16 bits and in 32, judged by transformers."""

from __future__ import annotations

import pytest
import torch
from tests.engine_run.encoder_models import (
    MODELS,
    colbert_of,
    encoder_of,
    maxsim_of,
    scores_of,
    states_of,
    token_vectors_of,
)
from tests.engine_run.gpu.gpu_engine import ROUTER, GPUEngine

from tandem.engine.worker.graphs import StepGraphs
from tandem.engine.worker.staging import StepShape
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import PooledOutput
from tandem.protocol.pooling import (
    NO_SAMPLING,
    LateInteractionMode,
    LateInteractionParams,
    PoolingParams,
    PoolingTask,
    PoolingType,
)
from tandem.protocol.requests import EngineCoreRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTHS = (1, 5, 128, 100, 33, 64)
PROMPTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate(LENGTHS)]
CLOSE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-3}
"""Of a cosine, by what is rounded to."""


def pooled(engine: GPUEngine, asked: list[tuple[list[int], PoolingParams]]) -> list[torch.Tensor]:
    for number, (prompt, params) in enumerate(asked):
        request = EngineCoreRequest(
            key=RequestKey(ROUTER, f"p{number}", 0),
            prompt_token_ids=prompt,
            params=NO_SAMPLING,
            pooling=params,
        )
        refusal = engine.core.add(request)
        assert refusal is None, refusal
    found: dict[str, torch.Tensor] = {}
    while engine.core.has_work:
        for outputs in engine.core.step().outputs.values():
            for each in outputs:
                assert isinstance(each, PooledOutput)
                found[each.request] = torch.tensor(each.vector)
    return [found[f"p{number}"] for number in range(len(asked))]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", MODELS)
def test_vectors_and_classes(name: str, dtype: str) -> None:
    """Of first tokens and means, prompts of one token to all positions in a step; pairs typed."""
    folder, model = encoder_of(name)
    engine = GPUEngine(folder, dtype=dtype, max_num_batched_tokens=256, max_num_seqs=8)
    mean = PoolingParams(pooling_type=PoolingType.MEAN)
    got = pooled(engine, [(prompt, way) for prompt in PROMPTS for way in (PoolingParams(), mean)])
    for index, prompt in enumerate(PROMPTS):
        states = states_of(model, prompt)
        for vector, want in zip(got[2 * index :], (states[0], states.mean(0)), strict=False):
            assert torch.cosine_similarity(vector, want, 0) > 1 - CLOSE[dtype]
    if "num_labels" not in MODELS[name][2] or dtype != "float32":
        return
    at = 40 if name.startswith("bert") else None
    raw = PoolingParams(task=PoolingTask.CLASSIFY, activation=False, second_text_at=at)
    (scores,) = pooled(engine, [(PROMPTS[3], raw)])
    torch.testing.assert_close(scores, scores_of(model, PROMPTS[3], at), rtol=1e-3, atol=1e-3)


class Counted(StepGraphs):
    """An engine's graphs, and which were replayed."""

    def take(self, others: StepGraphs) -> None:
        self.__dict__.update(others.__dict__)
        self.replayed: set[StepShape] = set()

    def replay(self, shape: StepShape) -> torch.Tensor:
        self.replayed.add(shape)
        return super().replay(shape)


def test_graphs_change_no_vector() -> None:
    """Steps of every size up to the largest are replayed, but those with a second text; the vectors
    are those of kernels that are launched one by one."""
    folder, _ = encoder_of("bert")
    made, replayed = [], set()
    for eager in (False, True):
        engine = GPUEngine(
            folder,
            dtype="float32",
            max_num_batched_tokens=256,
            max_num_seqs=8,
            enforce_eager=eager,
        )
        graphs = engine.runner.graphs
        assert bool(len(graphs)) is not eager
        engine.runner.graphs = counted = Counted()
        counted.take(graphs)
        asked = [(prompt, PoolingParams()) for prompt in PROMPTS if len(prompt) > 1]
        alone = [vector for each in asked for vector in pooled(engine, [each])]
        made.append([*alone, *pooled(engine, asked * 2)])
        replayed |= counted.replayed
    assert len(replayed) > 3
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_late_interaction() -> None:
    folder, body, layer = colbert_of()
    engine = GPUEngine(folder, dtype="float32", max_num_batched_tokens=256, max_num_seqs=8)

    def late(mode: LateInteractionMode) -> PoolingParams:
        asked = LateInteractionParams(mode=mode, query_key="q", query_uses=len(PROMPTS))
        return PoolingParams(task=PoolingTask.TOKEN_EMBED, late_interaction=asked)

    query = PROMPTS[1]
    assert pooled(engine, [(query, late(LateInteractionMode.CACHE_QUERY))])[0].item() == 5
    score = late(LateInteractionMode.SCORE_DOC)
    scores = pooled(engine, [(prompt, score) for prompt in PROMPTS])
    kept = token_vectors_of(body, layer, query)
    for prompt, got in zip(PROMPTS, scores, strict=True):
        want = maxsim_of(kept, token_vectors_of(body, layer, prompt))
        assert got.item() == pytest.approx(want, abs=1e-3)
