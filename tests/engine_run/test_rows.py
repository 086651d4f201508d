"""Rows of several tokens padded to the shapes of graphs, run without graphs."""

from __future__ import annotations

import pytest
import torch
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.test_drafts import (
    COUNT,
    DRAFTS,
    PARAMS,
    PROMPTS,
    check_drafted,
    engine,
    ready,
    resumed,
)
from tests.engine_run.test_padding import Uncaptured

from tandem.engine.worker.graphs import StepGraphs, row_shapes, step_shapes
from tandem.engine.worker.inputs import StepStager
from tandem.engine.worker.kv_cache import KVCacheMemory
from tandem.engine.worker.staging import StepShape


def padded(made: CPUEngine, shapes: list[StepShape]) -> Uncaptured:
    """Pad the engine's steps to ``shapes``; its free blocks and the spare one are NaN."""
    runner = made.executor.worker.runner  # type: ignore[attr-defined]
    config, device = made.core.config, torch.device("cpu")
    num_blocks = made.core.capacity.num_blocks
    runner.kv_cache = KVCacheMemory(config.layer_groups, num_blocks, device, spare=1)
    runner.kv_cache.memory.view(torch.float32).fill_(torch.nan)
    runner.stager = StepStager(
        runner.batch,
        device,
        max_tokens=600,
        max_len=config.max_model_len,
        spare_block=num_blocks,
        history=config.scheduler.lookup is not None,
    )
    graphs = runner.graphs = Uncaptured(runner)
    graphs.offer(shapes)
    return graphs


def all_shapes(num_drafts: int) -> list[StepShape]:
    return step_shapes(max_rows=48, max_tokens=600, max_captured=600, num_drafts=num_drafts)


@pytest.mark.parametrize(
    ("name", "overlap"), [("greedy", False), ("penalties", True), ("logprobs", True)]
)
def test_padded_rows_of_drafts_change_no_token(name, overlap):
    """Rows of one token, of right and of wrong drafts share one class."""
    made = ready(name, async_scheduling=overlap, speculative_config=DRAFTS)
    graphs = padded(made, all_shapes(4))
    assert check_drafted(name, made, wrong_every=3) > 10
    wide = [each for each in graphs.replayed if each.width]
    assert len(wide) > 5


@pytest.mark.parametrize("known", [8, 20])
def test_a_padded_resume_agrees_with_what_was_emitted(known):
    """The chunk that samples emitted tokens again is in a class that returns all states."""
    params = PARAMS["seeded"]
    (whole,) = engine().generate([PROMPTS[0]], COUNT, params)
    made = engine()
    graphs = padded(made, all_shapes(0))
    tokens, agreed, compared = resumed(made, params, tuple(whole[:known]))
    assert tokens == whole[known:]
    assert agreed == compared == min(16, known)
    assert any(each.whole for each in graphs.replayed)


def test_rows_of_drafts_fit_the_smallest_class():
    graphs = StepGraphs()
    graphs.offer(step_shapes(max_rows=256, max_tokens=8192, max_captured=2048, num_drafts=15))
    for rows, width in ((1, 2), (1, 16), (4, 4), (8, 8), (16, 16), (64, 8), (64, 2)):
        found = graphs.fit(StepShape(0, rows * width, rows, width), whole=True)
        assert found == StepShape(0, rows * width, rows, width, whole=True)
    # Few rows with drafts: all tokens count, not those of the widest row times the rows.
    assert graphs.fit(StepShape(50, 18, 2, 9), whole=True) == StepShape(0, 128, 64, 16, whole=True)
    assert graphs.fit(StepShape(3, 5, 1, 5), whole=True) == StepShape(0, 32, 4, 8, whole=True)
    # A resumed row is longer than drafts are, and next to a prompt's chunk.
    assert graphs.fit(StepShape(10, 40, 1, 40), whole=True) == StepShape(16, 112, 8, whole=True)
    assert graphs.fit(StepShape(70, 20, 1, 20), whole=True) == StepShape(256, 128, 8, whole=True)
    assert graphs.fit(StepShape(0, 600, 1, 600), whole=True) is None
    # Classes of the last tokens only stay the first choice of a prompt as long.
    assert graphs.fit(StepShape(0, 16, 1, 16)) == StepShape(0, 16, 8)


def test_no_class_of_rows_is_offered_without_drafts():
    assert row_shapes(0) == []
    assert len(row_shapes(15)) <= 27
    assert {each.width for each in row_shapes(3)} == {2, 4}
