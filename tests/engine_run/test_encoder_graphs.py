"""Encoders' steps padded to the shapes of graphs, run without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.encoder_models import POSITIONS, encoder_of

from tandem.engine.config import EngineConfig
from tandem.engine.worker import gpu
from tandem.engine.worker.graphs import StepGraphs, encoder_shapes
from tandem.engine.worker.inputs import StepStager
from tandem.engine.worker.staging import StepShape
from tandem.protocol.pooling import PoolingParams, PoolingTask, PoolingType

LENGTHS = (2, 5, POSITIONS, 100, 33, 64, 2, 9)
PROMPTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate(LENGTHS)]
KINDS = [
    PoolingParams(),
    PoolingParams(pooling_type=PoolingType.MEAN, normalize=False),
    PoolingParams(pooling_type=PoolingType.LAST, dimensions=20),
    PoolingParams(task=PoolingTask.TOKEN_EMBED),
]
SHAPES = encoder_shapes(max_rows=6, max_tokens=200, max_captured=200)


class Uncaptured(StepGraphs):
    """Classes whose replay is the padded step itself."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = runner
        self.replayed: list[StepShape] = []

    def replay(self, shape: StepShape) -> torch.Tensor:
        """Run what is staged at the class's addresses; the states of all of its tokens."""
        self.replayed.append(shape)
        inputs = self.runner.stager.views(shape, None, torch.empty(0))
        states: torch.Tensor = self.runner.hidden(inputs)
        assert len(states) == shape.tokens
        return states


def engine_of(name: str, *, padded: bool) -> CPUEngine:
    """Steps of up to 200 tokens and six prompts."""
    engine = CPUEngine(encoder_of(name)[0], max_num_batched_tokens=200, max_num_seqs=6)
    if padded:
        runner = engine.executor.worker.runner  # type: ignore[attr-defined]
        runner.stager = StepStager(
            runner.batch,
            torch.device("cpu"),
            max_tokens=200,
            max_len=POSITIONS,
            spare_block=0,
            whole=True,
        )
        runner.graphs = Uncaptured(runner)
        runner.graphs.offer(SHAPES)
    return engine


def vectors(engine: CPUEngine, prompts: list[list[int]]) -> list[list[float]]:
    keys = [engine.pool(prompt, params) for prompt in prompts for params in KINDS]
    engine.run()
    return [list(engine.pooled[key.request].vector) for key in keys]


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_padded_steps_give_the_same_vectors(name: str) -> None:
    """First, last and all states of prompts, in classes of several sizes and numbers of prompts."""
    padded, plain = engine_of(name, padded=True), engine_of(name, padded=False)
    got, want = vectors(padded, PROMPTS), vectors(plain, PROMPTS)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-5)
    replayed = padded.executor.worker.runner.graphs.replayed  # type: ignore[attr-defined]
    assert len(set(replayed)) > 2


def test_what_no_class_holds_runs_as_it_is() -> None:
    """Prompts of one token before others, and those with a second text; what is padded about them
    is the same."""
    padded, plain = (engine_of("bert-pairs", padded=each) for each in (True, False))
    made = []
    for engine in (padded, plain):
        typed = PoolingParams(task=PoolingTask.CLASSIFY, second_text_at=40)
        asked = [(PROMPTS[3], typed), ([7], KINDS[0]), (PROMPTS[4], KINDS[0])]
        keys = []
        for prompt, params in asked:
            keys.append(engine.pool(prompt, params))
            engine.run()
        keys += [engine.pool(prompt, KINDS[0]) for prompt in ([7], PROMPTS[5])]
        engine.run()
        made.append([torch.tensor(engine.pooled[key.request].vector) for key in keys])
    torch.testing.assert_close(made[0], made[1], rtol=1e-5, atol=1e-5)
    replayed = padded.executor.worker.runner.graphs.replayed  # type: ignore[attr-defined]
    assert [each.tokens for each in replayed] == [64]


def test_classes_hold_every_step_of_prompts() -> None:
    """With an eighth of padding at most where the device is kept busy, a quarter from 256 tokens
    on, and few places for prompts where few are enough."""
    shapes = encoder_shapes(max_rows=256, max_tokens=8192, max_captured=8192)
    assert len(shapes) == len(set(shapes)) < 80
    graphs = StepGraphs()
    graphs.offer(shapes)
    for tokens in (*range(1, 300), *range(300, 8193, 61), 8192):
        for chunks in (1, min(32, tokens), min(256, tokens)):
            found = graphs.fit(StepShape(0, tokens, chunks))
            assert found is not None
            assert found.chunk_tokens >= tokens
            assert chunks <= found.chunks <= (32 if chunks <= 32 else 256)
            if tokens >= 256:
                assert found.chunk_tokens <= tokens * (5 / 4 if tokens < 2048 else 9 / 8)
    assert graphs.fit(StepShape(0, 8193, 1)) is None
    assert graphs.fit(StepShape(1, 64, 1)) is None
    small = encoder_shapes(max_rows=4, max_tokens=40, max_captured=8192)
    assert max(each.tokens for each in small) == 40
    assert max(each.chunks for each in small) == 4


def test_an_encoder_has_graphs_up_to_its_largest_step() -> None:
    """Unless that is said; a decoder's go up to 2,048 tokens, and eager engines have none."""
    folder, _ = encoder_of("bert")
    options: dict[str, Any] = {"device": "cpu", "max_num_batched_tokens": 4096}

    def largest(**settings: Any) -> int:
        shapes = gpu._shapes(EngineConfig.of(folder, **options, **settings))
        return max((each.tokens for each in shapes), default=0)

    assert largest() == 4096
    assert largest(max_cudagraph_capture_size=300) == 300
    assert largest(enforce_eager=True) == 0
