"""Vectors on a GPU: the same columns, sums and heads as on a CPU, and transformers' vectors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.engine_run.gpu.gpu_engine import ROUTER, GPUEngine
from tests.engine_run.tiny_models import folder_of, judge_of

from tandem.engine.step import NewSequence, SeqId
from tandem.engine.worker.pooling import Poolers
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import PooledOutput
from tandem.protocol.pooling import (
    NO_SAMPLING,
    ModelPooling,
    PoolingParams,
    PoolingTask,
    PoolingType,
)
from tandem.protocol.requests import EngineCoreRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTHS = (1, 5, 64, 100, 33, 230)
PROMPTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate(LENGTHS)]
WAYS = [
    *(PoolingParams(pooling_type=each) for each in PoolingType),
    PoolingParams(normalize=False, dimensions=7),
    PoolingParams(task=PoolingTask.TOKEN_EMBED, dimensions=12),
    PoolingParams(task=PoolingTask.CLASSIFY),
]
LABELS = ModelPooling(labels=("a", "b", "c"))
WIDTH = 48


def pooled_on(device):
    """Two steps of every way over random states, whose prompts end in the second."""
    weight = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    head = SimpleNamespace(
        classify=lambda x: x @ weight.T,
        probabilities=lambda x: x.softmax(-1),
        token_vectors=lambda x: x,
    )
    poolers = Poolers(len(WAYS))
    for row, params in enumerate(WAYS):
        asked = LABELS.resolve(params, hidden_size=WIDTH, num_tokens=2 * row + 6)
        poolers.add(
            row, NewSequence(SeqId(row), [], 2 * row + 6, NO_SAMPLING, 0, (), (), pooling=asked)
        )
    states = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(2))
    found: dict[SeqId, bytes] = {}
    rows = np.arange(len(WAYS))
    for first, counts in ((rows * 0, rows + 3), (rows + 3, rows + 3)):
        step = SimpleNamespace(index=rows, first=first, counts=counts, ends=counts.cumsum() - 1)
        wanted = poolers.metadata(step)
        assert wanted is not None
        hidden = states[: counts.sum()][wanted.tokens].to(device).bfloat16()
        with torch.inference_mode():
            made = poolers.pool(wanted, hidden, head)
        if device == "cuda":
            torch.cuda.synchronize()
        found |= made.as_bytes()
        states = states.flip(0)
    return found


def test_a_gpu_pools_what_a_cpu_pools():
    """Every way beside the others, over two chunks."""
    here, there = pooled_on("cpu"), pooled_on("cuda")
    assert set(here) == set(there) == set(range(len(WAYS)))
    for row, values in here.items():
        got, want = (np.frombuffer(each, "<f4") for each in (there[row], values))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_vectors_of_an_engine_are_those_of_transformers(name):
    engine = GPUEngine(
        folder_of(name, wide=True),
        dtype="bfloat16",
        num_gpu_blocks_override=64,
        max_num_batched_tokens=128,
        max_num_seqs=16,
    )
    asked: dict[str, tuple[list[int], PoolingParams]] = {}
    for index, prompt in enumerate(PROMPTS):
        for params in WAYS[:3]:
            key = RequestKey(ROUTER, f"v{len(asked)}", 0)
            request = EngineCoreRequest(
                key=key, prompt_token_ids=prompt, params=NO_SAMPLING, pooling=params
            )
            assert engine.core.add(request) is None
            asked[key.request] = (prompt, params)
        engine.add(PROMPTS[index], 8)
    found: dict[str, PooledOutput] = {}
    while engine.core.has_work:
        for outputs in engine.core.step().outputs.values():
            found |= {each.request: each for each in outputs if isinstance(each, PooledOutput)}
    assert set(found) == set(asked)
    judge = judge_of(name, wide=True)
    for name_of, (prompt, params) in asked.items():
        with torch.inference_mode():
            states = judge.model(torch.tensor([prompt])).last_hidden_state[0]
        of: dict[object, torch.Tensor] = {
            PoolingType.MEAN: states.mean(0),
            PoolingType.CLS: states[0],
        }
        want = of.get(params.pooling_type, states[-1])
        got = torch.tensor(found[name_of].vector)
        assert torch.cosine_similarity(got, want, 0) > 0.99
    engine.core.check_integrity()
