"""Queries that a rank keeps and documents that it scores, against a plain MaxSim by numpy."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_run.cpu_engine import ROUTER, CPUEngine
from tests.engine_run.encoder_models import colbert_of, maxsim_of, token_vectors_of
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.tiny_models import folder_of, judge_of

from tandem.engine import attention, layers, models, sample, worker
from tandem.engine.config import read_facts
from tandem.engine.step import SeqId
from tandem.engine.worker.pooling import LateInteractionRunner, TokenVectors
from tandem.protocol.errors import RefusalCode
from tandem.protocol.ids import RequestKey
from tandem.protocol.pooling import (
    NO_SAMPLING,
    LateInteractionMode,
    LateInteractionParams,
    PoolingParams,
    PoolingTask,
)
from tandem.protocol.requests import EngineCoreRequest

pytestmark = pytest.mark.full

QUERY = [5, 9, 17, 200]
DOCUMENTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate((1, 40, 128, 9))]
KEEP, SCORE = LateInteractionMode.CACHE_QUERY, LateInteractionMode.SCORE_DOC


def late(mode: LateInteractionMode, key: str = "q", uses: int = 1, **more: Any) -> PoolingParams:
    params = LateInteractionParams(mode=mode, query_key=key, query_uses=uses)
    return PoolingParams(task=PoolingTask.TOKEN_EMBED, late_interaction=params, **more)


def answers(engine: CPUEngine, *asked: tuple[list[int], PoolingParams]) -> list[float]:
    """One value each, all asked at once."""
    keys = [engine.pool(prompt, params) for prompt, params in asked]
    engine.run()
    found = [engine.pooled[key.request].vector for key in keys]
    assert all(len(each) == 1 for each in found)
    return [each[0] for each in found]


@pytest.mark.parametrize("multiproc", [False, True])
def test_documents_are_scored_against_the_query_that_is_kept(multiproc: bool) -> None:
    """As often as it is kept for; not a number before, after, and under another key."""
    folder, body, layer = colbert_of()
    executor = ForkedExecutor() if multiproc else None
    engine = CPUEngine(folder, executor=executor, max_num_batched_tokens=140)
    try:
        query = token_vectors_of(body, layer, QUERY)
        want = [maxsim_of(query, token_vectors_of(body, layer, each)) for each in DOCUMENTS]
        assert math.isnan(answers(engine, (DOCUMENTS[0], late(SCORE)))[0])
        uses = len(DOCUMENTS)
        assert answers(engine, (QUERY, late(KEEP, uses=uses))) == [len(QUERY)]
        assert math.isnan(answers(engine, (DOCUMENTS[0], late(SCORE, "other")))[0])
        scores = answers(engine, *((each, late(SCORE)) for each in DOCUMENTS))
        assert scores == pytest.approx(want, abs=1e-3)
        assert math.isnan(answers(engine, (DOCUMENTS[0], late(SCORE)))[0])
    finally:
        engine.core.close()


def test_vectors_of_tokens_are_what_the_layer_makes() -> None:
    """Beside queries and documents in one step; fewer values where that is asked for."""
    folder, body, layer = colbert_of()
    engine = CPUEngine(folder)
    told = engine.pool(DOCUMENTS[1], PoolingParams(task=PoolingTask.TOKEN_EMBED))
    kept = engine.pool(QUERY, late(KEEP))
    engine.run()
    got = np.array(engine.pooled[told.request].vector).reshape(40, 16)
    np.testing.assert_allclose(got, token_vectors_of(body, layer, DOCUMENTS[1]), atol=1e-4)
    assert list(engine.pooled[kept.request].vector) == [len(QUERY)]


def test_a_layers_width_is_that_of_its_weights_where_nothing_names_it() -> None:
    """ColBERTs come with 96 or 48 values, too; without weights it is the usual one."""
    folder, body, layer = colbert_of(96, named=False)
    engine = CPUEngine(folder)
    told = engine.pool(QUERY, PoolingParams(task=PoolingTask.TOKEN_EMBED))
    engine.run()
    got = np.array(engine.pooled[told.request].vector).reshape(len(QUERY), 96)
    np.testing.assert_allclose(got, token_vectors_of(body, layer, QUERY), atol=1e-4)
    weights = folder / "model.safetensors"
    kept = weights.read_bytes()
    for other in (kept[:20], b"", b"\xff" * 100):
        weights.write_bytes(other)
        assert read_facts(folder).pooling.token_values == 128
    weights.write_bytes(kept)


def test_a_decoders_prompts_meet_whole_however_they_are_cut() -> None:
    """Vectors of chunks are joined, of the query and of documents."""
    engine = CPUEngine(folder_of("qwen3"), max_num_batched_tokens=24)
    vectors = []
    for prompt in (DOCUMENTS[1], DOCUMENTS[2]):
        with torch.inference_mode():
            states = judge_of("qwen3").model(torch.tensor([prompt])).last_hidden_state[0]
        vectors.append((states / states.norm(dim=1, keepdim=True)).numpy())
    assert answers(engine, (DOCUMENTS[1], late(KEEP, uses=2))) == [40]
    (score,) = answers(engine, (DOCUMENTS[2], late(SCORE)))
    assert score == pytest.approx(maxsim_of(*vectors), abs=1e-2)


def test_a_request_that_is_given_up_leaves_nothing() -> None:
    engine = CPUEngine(folder_of("qwen3"), max_num_batched_tokens=24)
    gone = engine.pool(DOCUMENTS[2], late(KEEP))
    engine.core.step()
    assert engine.core.abort(gone)
    engine.run()
    engine.core.step()
    poolers = engine.executor.worker.runner.batch.poolers  # type: ignore[attr-defined]
    engine.pool(QUERY, late(KEEP))  # its step tells the rank who is gone
    engine.run()
    assert (len(poolers.late), poolers._chunks) == (1, {})


def of(key: str, mode: LateInteractionMode, values: Any, seq: int = 0) -> TokenVectors:
    params = LateInteractionParams(mode=mode, query_key=key, query_uses=9)
    return TokenVectors(SeqId(seq), params, torch.tensor(values, dtype=torch.float32))


def test_the_query_used_longest_ago_goes_when_room_ends() -> None:
    """Never more bytes than the bound; one that is kept again takes its own place."""
    runner = LateInteractionRunner(most_bytes=2 * 8)  # two queries of a token of two values
    document = of("a", SCORE, [[1.0, 1.0]])
    for key in "ab":
        runner.postprocess([of(key, KEEP, [[1.0, 2.0]])])
    assert runner.postprocess([document])[0][1].tolist() == [3.0]
    runner.postprocess([of("c", KEEP, [[1.0, 2.0]])])
    assert len(runner) == 2
    assert math.isnan(runner.postprocess([of("b", SCORE, [[1.0, 1.0]])])[0][1].item())
    runner.postprocess([of("a", KEEP, [[5.0, 5.0]])])
    assert len(runner) == 2
    assert runner.postprocess([document])[0][1].tolist() == [10.0]


def test_a_query_meets_documents_of_the_step_in_which_it_came() -> None:
    """Whatever their order, and several queries side by side."""
    made = LateInteractionRunner().postprocess(
        [
            of("a", SCORE, [[1.0, 0.0], [0.0, 3.0]], 0),
            of("b", KEEP, [[1.0, 1.0]], 1),
            of("a", KEEP, [[1.0, 0.0], [0.0, 1.0]], 2),
            of("b", SCORE, [[2.0, 2.0]], 3),
            of("a", SCORE, [[-1.0, -1.0]], 4),
        ]
    )
    assert {seq: value.item() for seq, value in made} == {0: 4.0, 1: 1.0, 2: 2.0, 3: 4.0, 4: -2.0}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (PoolingParams(), "task"),
        (PoolingParams(task=PoolingTask.CLASSIFY), "task"),
        (PoolingParams(task=PoolingTask.TOKEN_EMBED, dimensions=17), "dimensions"),
        (late(KEEP, ""), "late_interaction.query_key"),
        (late(KEEP, "q" * 65), "late_interaction.query_key"),
        (late(KEEP, uses=0), "late_interaction.query_uses"),
        (late(KEEP, uses=(1 << 20) + 1), "late_interaction.query_uses"),
        (late("sing"), "late_interaction.mode"),  # type: ignore[arg-type]
    ],
)
def test_what_it_does_not_do_is_refused_by_name(params: PoolingParams, param: str) -> None:
    """One vector for a prompt, classes, more values than there are, keys and uses out of bounds."""
    engine = CPUEngine(colbert_of()[0])
    refusal = engine.core.add(
        EngineCoreRequest(
            key=RequestKey(ROUTER, "a", 0),
            prompt_token_ids=QUERY,
            params=NO_SAMPLING,
            pooling=params,
        )
    )
    assert refusal is not None
    assert (refusal.code, refusal.param) == (RefusalCode.INVALID, param)


def test_only_vectors_of_tokens_are_kept() -> None:
    """Late interaction has no meaning for one vector of a prompt."""
    engine = CPUEngine(folder_of("qwen3"))
    params = LateInteractionParams(mode=KEEP, query_key="q")
    refusal = engine.core.add(
        EngineCoreRequest(
            key=RequestKey(ROUTER, "a", 0),
            prompt_token_ids=QUERY,
            params=NO_SAMPLING,
            pooling=PoolingParams(late_interaction=params),
        )
    )
    assert refusal is not None
    assert refusal.param == "late_interaction"


def test_no_step_waits_for_its_device_to_bring_numbers_there() -> None:
    """A tensor of Python's numbers that is made on a device waits for all that is queued there:
    ``index_on`` and ``on_device`` do not."""
    waits = []
    for package in (attention, layers, models, sample, worker):
        for path in Path(package.__path__[0]).rglob("*.py"):
            for each in ast.walk(ast.parse(path.read_text())):
                if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Attribute):
                    continue
                named = {keyword.arg for keyword in each.keywords}
                made = each.func.attr in ("tensor", "as_tensor") and "device" in named
                if made or each.func.attr == "new_tensor":
                    waits.append(f"{path.name}:{each.lineno}")
    assert waits == []
