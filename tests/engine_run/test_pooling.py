"""Requests that return no token: vectors of prompts, through the scheduler of all."""

import msgspec
import pytest
import torch
from tests.engine_run.cpu_engine import ROUTER, CPUEngine
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.tiny_models import folder_of, judge_of, judged

from tandem.engine.scheduler.request_table import RequestTable
from tandem.protocol.errors import RefusalCode
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.outputs import FinishReason
from tandem.protocol.pooling import NO_SAMPLING, PoolingParams, PoolingTask, PoolingType
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce
from tandem.protocol.sampling import SamplingParams

PROMPTS = [[(7 * i + j * j) % 300 + 5 for j in range(n)] for i, n in enumerate((1, 5, 64, 100, 33))]
KINDS = [
    PoolingParams(),
    PoolingParams(normalize=False),
    PoolingParams(pooling_type=PoolingType.MEAN),
    PoolingParams(pooling_type=PoolingType.MEAN, normalize=False),
    PoolingParams(pooling_type=PoolingType.CLS, dimensions=20),
    PoolingParams(dimensions=48),
]


def wanted(prompt, params):
    with torch.inference_mode():
        states = judge_of("qwen3").model(torch.tensor([prompt])).last_hidden_state[0]
    of = {PoolingType.MEAN: states.mean(0), PoolingType.CLS: states[0]}
    vector = of.get(params.pooling_type, states[-1])[: params.dimensions]
    return vector if params.normalize is False else vector / vector.norm()


def check(output, prompt, params):
    assert output.finish is FinishReason.STOP
    assert output.num_prompt_tokens == len(prompt)
    torch.testing.assert_close(
        torch.tensor(output.vector), wanted(prompt, params), rtol=1e-3, atol=1e-3
    )


def poolers_of(engine):
    return engine.executor.worker.runner.batch.poolers


@pytest.mark.parametrize("ahead", [False, True])
def test_vectors_are_those_of_transformers_beside_tokens(ahead):
    """Chunks, mixed steps, prompts of one token, both poolings; and tokens are what they were."""
    engine = CPUEngine(
        folder_of("qwen3"), max_num_batched_tokens=40, max_num_seqs=5, async_scheduling=ahead
    )
    asked, drawn = {}, {}
    for index, prompt in enumerate(PROMPTS):
        params = KINDS[index % len(KINDS)]
        asked[engine.pool(prompt, params).request] = (prompt, params)
        drawn[engine.add(prompt, 6).request] = prompt
    made = engine.run()
    assert made == {name: judged("qwen3", prompt, 6)[0] for name, prompt in drawn.items()}
    assert set(engine.pooled) == set(asked)
    for name, (prompt, params) in asked.items():
        check(engine.pooled[name], prompt, params)
    engine.core.check_integrity()
    assert not poolers_of(engine)


@pytest.mark.parametrize("params", KINDS)
def test_a_cached_prefix_changes_no_vector(params):
    """The last token's state takes a prefix from the cache; a mean computes all of it again."""
    engine = CPUEngine(folder_of("qwen3"), max_num_batched_tokens=48)
    first = engine.pool(PROMPTS[3], params)
    engine.run()
    again = engine.pool(PROMPTS[3], params)
    engine.run()
    for key in (first, again):
        check(engine.pooled[key.request], PROMPTS[3], params)
    cached = engine.pooled[again.request].num_cached_tokens
    assert cached == (0 if params.needs_all_states else 96)


def test_preempted_and_cancelled_ones_leave_nothing_behind(monkeypatch):
    """Too few blocks for all at once, and a prompt that is given up between its chunks."""
    preempted = []
    preempt = RequestTable.preempt

    def noted(request_table, request):
        preempted.append((request.request_id, request.num_computed))
        preempt(request_table, request)

    monkeypatch.setattr(RequestTable, "preempt", noted)
    engine = CPUEngine(
        folder_of("qwen3"), num_gpu_blocks_override=12, max_num_batched_tokens=24, watermark=0.0
    )
    drawn = [engine.add(PROMPTS[1], 60), engine.add(PROMPTS[2], 40)]
    mean = KINDS[2]
    pooled = [engine.pool(PROMPTS[3], mean) for _ in range(2)]
    gone = engine.pool(PROMPTS[4], mean)
    engine.core.step()
    engine.core.step()
    assert engine.core.abort(gone)
    made = engine.run()
    assert set(made) == {key.request for key in drawn}
    assert any(name == pooled[0].request and 0 < computed < 100 for name, computed in preempted)
    for key in pooled:
        check(engine.pooled[key.request], PROMPTS[3], mean)
    assert gone.request not in engine.pooled
    engine.core.check_integrity()
    engine.core.step()
    assert not poolers_of(engine)._kinds.any()


@pytest.mark.full
def test_vectors_cross_to_a_rank_in_another_process():
    engine = CPUEngine(folder_of("qwen3"), executor=ForkedExecutor(), num_gpu_blocks_override=32)
    try:
        key = engine.pool(PROMPTS[2], KINDS[2])
        engine.run()
        check(engine.pooled[key.request], PROMPTS[2], KINDS[2])
    finally:
        engine.core.close()


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"kv": Produce(Incarnation(b"d"))}, RefusalCode.UNSUPPORTED, "pooling"),
        ({"kv": Consume(Incarnation(b"p"))}, RefusalCode.UNSUPPORTED, "pooling"),
        ({"params": SamplingParams(max_tokens=1)}, RefusalCode.INVALID, "params"),
        ({"params": SamplingParams(temperature=0, max_tokens=2)}, RefusalCode.INVALID, "params"),
        ({"emitted": ((5,),)}, RefusalCode.INVALID, "emitted"),
        ({"pooling": PoolingParams(pooling_type="max")}, RefusalCode.INVALID, "pooling_type"),  # type: ignore[arg-type]
        ({"pooling": PoolingParams(dimensions=0)}, RefusalCode.INVALID, "dimensions"),
        ({"pooling": PoolingParams(dimensions=49)}, RefusalCode.INVALID, "dimensions"),
        ({"pooling": PoolingParams(task=PoolingTask.CLASSIFY)}, RefusalCode.INVALID, "task"),
        ({"pooling": PoolingParams(activation=True)}, RefusalCode.INVALID, "activation"),
        ({"pooling": PoolingParams(normalize=2)}, RefusalCode.INVALID, "normalize"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_vector_is_refused_by_name(change, code, param):
    """A hand-off, parameters of drawing, tokens of an earlier attempt, an unknown pooling."""
    engine = CPUEngine(folder_of("qwen3"))
    request = EngineCoreRequest(
        key=RequestKey(ROUTER, "a", 0),
        prompt_token_ids=[5, 6],
        params=NO_SAMPLING,
        pooling=PoolingParams(),
    )
    refusal = engine.core.add(msgspec.structs.replace(request, **change))
    assert refusal is not None
    assert (refusal.code, refusal.param) == (code, param)


def test_a_prompt_that_is_pooled_may_take_the_whole_context():
    """And every block there is; it needs no room for a token. One more is refused."""
    prompt = [(j * j) % 300 + 5 for j in range(512)]
    engine = CPUEngine(folder_of("qwen3"), num_gpu_blocks_override=32, max_num_batched_tokens=200)
    keys = [engine.pool(prompt, KINDS[index]) for index in (0, 2)]
    engine.run()
    for key, kind in zip(keys, (0, 2), strict=True):
        check(engine.pooled[key.request], prompt, KINDS[kind])
    request = EngineCoreRequest(
        key=RequestKey(ROUTER, "a", 0),
        prompt_token_ids=[*prompt, 5],
        params=NO_SAMPLING,
        pooling=PoolingParams(),
    )
    refusal = engine.core.add(request)
    assert refusal is not None
    assert (refusal.code, refusal.param) == (RefusalCode.NEVER_FITS, "prompt_token_ids")
    assert "513 tokens, at most 512" in refusal.message
    engine.core.check_integrity()
