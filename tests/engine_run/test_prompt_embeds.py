"""Prompts that come as embeddings, in an engine: tokens as of ids, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine_run.cpu_engine import GREEDY, ROUTER, CPUEngine
from tests.engine_run.embedded import ZERO_SAID, embeds_for, embeds_of, penalized, table_of
from tests.engine_run.encoder_models import encoder_of
from tests.engine_run.run_driver import Driver
from tests.engine_run.test_padding import Uncaptured
from tests.engine_run.tiny_models import MODELS, folder_of, judge_of, judged

from tandem.engine.config import EngineConfig
from tandem.engine.executor.multiproc import MultiprocExecutor
from tandem.engine.scheduler.request_table import RequestTable
from tandem.engine.worker.inputs import StepStager
from tandem.engine.worker.kv_cache import KVCacheMemory
from tandem.engine.worker.staging import StepShape
from tandem.engine.worker.vectors import VectorStage
from tandem.protocol.embeds import PLACEHOLDER
from tandem.protocol.errors import InvalidParameter, RefusalCode
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.pooling import NO_SAMPLING, PoolingParams
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams

FOLDER = folder_of("llama")
PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(70 + each)] for each in range(4)]


def engine(folder=FOLDER, **settings) -> CPUEngine:
    fields: dict[str, Any] = {"num_gpu_blocks_override": 60, "dtype": "float32"} | settings
    return CPUEngine(folder, enable_prompt_embeds=True, **fields)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_tables_rows_give_the_tokens_of_ids(name):
    made = engine(folder_of(name))
    key = made.add_embeds(embeds_for(folder_of(name), PROMPTS[0]), 8)
    assert made.run()[key.request] == judged(name, PROMPTS[0], 8)[0]


@pytest.mark.full
@pytest.mark.parametrize(("caching", "overlap"), [(False, False), (True, True)])
def test_mixed_batches_chunks_and_preemptions(monkeypatch, caching, overlap):
    """Beside prompts of ids, in chunks that end within blocks, and computed again where blocks
    were too few."""
    preempted, preempt = [], RequestTable.preempt

    def noted(request_table, request):
        preempted.append(request.source.prompt_embeds is not None)
        preempt(request_table, request)

    monkeypatch.setattr(RequestTable, "preempt", noted)
    made = engine(
        num_gpu_blocks_override=12,
        max_num_batched_tokens=24,
        enable_prefix_caching=caching,
        async_scheduling=overlap,
    )
    keys = [
        made.add_embeds(embeds_for(FOLDER, prompt), 40) if index % 2 else made.add(prompt, 40)
        for index, prompt in enumerate(PROMPTS)
    ]
    tokens = made.run()
    assert [tokens[each.request] for each in keys] == [judged("llama", p, 40)[0] for p in PROMPTS]
    assert any(preempted)


def test_what_a_table_has_not_is_as_transformers_has_it():
    """Vectors of no token: sums of rows."""
    table = table_of(FOLDER)
    mixed = 0.5 * table[PROMPTS[0]] + 0.5 * table[PROMPTS[0][::-1]]
    made, model = engine(), judge_of("llama")
    key = made.add_embeds(embeds_of(mixed), 6)
    expected: list[int] = []
    with torch.inference_mode():
        for _ in range(6):
            behind = torch.cat([mixed, table[expected]])[None]
            expected.append(int(model(inputs_embeds=behind).logits[0, -1].argmax()))
    assert made.run()[key.request] == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_than_the_models(dtype):
    """Half a float is cast to what the stream has."""
    halves = table_of(FOLDER)[PROMPTS[0]].to(dtype)
    made = engine()
    key = made.add_embeds(embeds_of(halves), 1)
    with torch.inference_mode():
        logits = judge_of("llama")(inputs_embeds=halves.float()[None]).logits[0, -1]
    assert made.run()[key.request] == [int(logits.argmax())]


def test_equal_prefixes_are_cached_and_ids_never_collide():
    """A block is found by the vectors in it alone: neither by the placeholders' ids nor by the ids
    that the table has these rows for."""
    made = engine()
    embeds = embeds_for(FOLDER, PROMPTS[0])
    first = made.add_embeds(embeds, 4)
    tokens = made.run()[first.request]
    again = made.add_embeds(embeds, 4)
    longer = made.add_embeds(embeds_for(FOLDER, [*PROMPTS[0][:48], *PROMPTS[1][:30]]), 4)
    ids = made.add(PROMPTS[0], 4)
    zeros = made.add([PLACEHOLDER] * len(PROMPTS[0]), 4)
    other = made.add_embeds(embeds_for(FOLDER, PROMPTS[1]), 4)
    said = made.run()
    assert said[again.request] == tokens == said[ids.request]
    assert said[zeros.request] == judged("llama", [PLACEHOLDER] * len(PROMPTS[0]), 4)[0]
    assert made.cached[again.request] == 64
    assert made.cached[longer.request] == 48
    assert [made.cached[each.request] for each in (ids, zeros, other)] == [0, 0, 0]


def test_a_block_behind_the_prompts_end_is_found_with_the_same_vectors_alone():
    """The last vectors and the first tokens share a block: what follows is found by both."""
    made = engine()
    embeds = embeds_for(FOLDER, PROMPTS[0])
    said = judged("llama", PROMPTS[0], 40)[0]
    made.add_embeds(embeds, 40)
    made.run()
    resumed = made.add_embeds(embeds, 40, emitted=(tuple(said[:30]),))
    changed = embeds_for(FOLDER, [*PROMPTS[0][:-1], 9])
    other = made.add_embeds(changed, 40, emitted=(tuple(said[:30]),))
    tokens = made.run()
    assert tokens[resumed.request] == said[30:]
    assert made.cached[resumed.request] == len(PROMPTS[0])  # 96, of which usage counts the prompt's
    assert made.cached[other.request] == 64


@pytest.mark.parametrize("emitted", [1, 12])
def test_a_resumed_request_goes_on(emitted):
    """Vectors, then tokens of an earlier attempt, in one prompt; replayed draws agree."""
    said = judged("llama", PROMPTS[0], 20)[0]
    made = engine(max_num_batched_tokens=32)
    made.add_embeds(embeds_for(FOLDER, PROMPTS[0]), 20, emitted=(tuple(said[:emitted]),))
    tokens: list[int] = []
    while made.core.has_work:
        for outputs in made.core.advance().outputs.values():
            for each in outputs:
                assert isinstance(each, EngineCoreOutput)
                tokens += each.token_ids
    assert tokens == said[emitted:]
    stats = made.core.scheduler.take_stats()
    assert stats.agreed_tokens == stats.replayed_tokens == emitted


def test_choices_and_seeds_are_those_of_ids():
    """n > 1 forks behind the vectors; draws depend on the seed alone."""
    asked = SamplingParams(temperature=0.9, seed=7, n=3, logprobs=2)

    def said(made, key):
        by_choice: dict[int, list[int]] = {}
        while made.core.has_work:
            for outputs in made.core.step().outputs.values():
                for each in outputs:
                    by_choice.setdefault(each.choice, []).extend(each.token_ids)
        return by_choice

    one, two = engine(), engine()
    ours = said(one, one.add_embeds(embeds_for(FOLDER, PROMPTS[0]), 12, asked))
    assert ours == said(two, two.add(PROMPTS[0], 12, asked))
    assert len(ours) == 3


def test_a_repetition_penalty_looks_at_the_output_alone():
    """The prompt has no ids: what was said is held against a token, and no placeholder is."""
    made, asked = engine(), SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.8)
    key = made.add_embeds(embeds_for(FOLDER, PROMPTS[0]), 12, asked)
    tokens = made.run()[key.request]
    with_ids = made.generate([PROMPTS[0]], 12, asked)[0]

    rows = table_of(FOLDER)[PROMPTS[0]]
    assert tokens == penalized(judge_of("llama"), rows, 12, 1.8)
    assert tokens != with_ids


@pytest.mark.parametrize("emitted", [0, 1, 2, 3])
def test_a_repetition_penalty_knows_no_placeholder_of_choices_and_resumed_ones(emitted):
    """Behind a fork no vector comes to the other choice's row, and a resumed request's last tokens
    are drawn again under the rules of then. The third token is the placeholders' id."""
    made = engine()
    asked = SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.8, n=2)
    expected = penalized(judge_of("llama"), table_of(FOLDER)[ZERO_SAID], 10, 1.8)
    assert expected.index(PLACEHOLDER) == 2
    said: dict[int, list[int]] = {0: [], 1: []}
    before = (tuple(expected[:emitted]),) * 2 if emitted else ()
    made.add_embeds(embeds_for(FOLDER, ZERO_SAID), 10, asked, emitted=before)
    while made.core.has_work:
        for outputs in made.core.advance().outputs.values():
            for each in outputs:
                assert isinstance(each, EngineCoreOutput)
                said[each.choice] += each.token_ids
    assert said == {0: expected[emitted:], 1: expected[emitted:]}
    stats = made.core.scheduler.take_stats()
    assert stats.agreed_tokens == stats.replayed_tokens == 2 * emitted


def test_large_values_harm_nobody_else():
    """The largest that are let through, beside an ordinary request, and one in its blocks after."""
    made = engine(num_gpu_blocks_override=14, enable_prefix_caching=False)
    wild = torch.full((60, 48), 32_000.0)
    wild[:, ::2] *= -1
    made.add_embeds(embeds_of(wild), 8)
    beside = made.add(PROMPTS[0], 8)
    assert made.run()[beside.request] == judged("llama", PROMPTS[0], 8)[0]
    assert made.generate([PROMPTS[1]], 8)[0] == judged("llama", PROMPTS[1], 8)[0]


def refused(made: CPUEngine, **fields):
    """Why an engine does not take a request."""
    embeds = fields.pop("embeds", embeds_for(FOLDER, PROMPTS[0]))
    given = {
        "key": RequestKey(ROUTER, "refused", 0),
        "prompt_token_ids": [PLACEHOLDER] * len(PROMPTS[0]),
        "params": GREEDY,
    }
    return made.core.add(EngineCoreRequest(**{**given, "prompt_embeds": embeds, **fields}))


def test_what_does_not_fit_is_refused_by_name():
    """Before anything is held, with field, value and what is allowed."""
    made, wide = engine(), torch.zeros(70, 50)
    cases: dict[str, dict[str, Any]] = {
        "hidden size": {"embeds": embeds_of(wide)},
        "placeholders": {"prompt_token_ids": [PLACEHOLDER] * 9},
        "float32, float16": {"embeds": embeds_of(torch.zeros(70, 48, dtype=torch.float64))},
        "prompt_logprobs": {"params": SamplingParams(temperature=0.0, seed=0, prompt_logprobs=1)},
        "pooling": {"params": NO_SAMPLING, "pooling": PoolingParams()},
    }
    for words, fields in cases.items():
        refusal = refused(made, **fields)
        assert refusal.code is RefusalCode.INVALID, words
        assert words in refusal.message
    assert not made.core.has_work


def test_without_the_flag_nothing_is_taken():
    made = CPUEngine(FOLDER, num_gpu_blocks_override=20)
    refusal = refused(made)
    assert refusal.code is RefusalCode.UNSUPPORTED
    assert "--enable-prompt-embeds" in refusal.message
    assert made.core.card().prompt_embeds is None
    assert engine().core.card().prompt_embeds == 48


def test_an_encoder_takes_none():
    with pytest.raises(InvalidParameter, match="enable_prompt_embeds: True is not allowed; false"):
        EngineConfig.of(encoder_of("bert")[0], device="cpu", enable_prompt_embeds=True)


@pytest.mark.full
def test_bytes_that_live_here_are_bounded():
    """One is taken whatever its size; the next when it has room, or nobody is left."""
    size = 70 * 48 * 4
    made = engine(max_held_embeds_bytes=size + 100)
    embeds = embeds_for(FOLDER, PROMPTS[0])
    made.add_embeds(embeds, 4)
    refusal = refused(made)
    assert refusal.code is RefusalCode.CAPACITY
    assert f"{size} bytes of prompt_embeds are here; {size} more pass {size + 100}" in (
        refusal.message
    )
    made.add(PROMPTS[1], 4)
    made.run()
    assert refused(made) is None
    made.run()


@pytest.mark.parametrize("staged", [False, True])
def test_steps_with_vectors_run_in_graphs_that_read_them(staged):
    """Beside a padded decode, then prompts of ids at the same places. Without a stage for vectors
    only decodes are padded."""
    driver = Driver(FOLDER, num_blocks=120, max_num_seqs=8)
    runner, device = driver.runner, torch.device("cpu")
    runner.kv_cache = KVCacheMemory(driver.config.layer_groups, 120, device, spare=1)
    runner.stager = StepStager(runner.batch, device, max_tokens=600, max_len=512, spare_block=120)
    runner.vectors = VectorStage(128, driver.config.facts.hidden_size, device) if staged else None
    graphs = runner.graphs = Uncaptured(runner)
    shapes = [StepShape(4, 0, 0), StepShape(0, 128, 8), StepShape(4, 124, 8)]
    graphs.offer(shapes)
    for vectors in (True, False):
        embeds = embeds_for(FOLDER, PROMPTS[1]) if vectors else None
        seqs = [driver.add(PROMPTS[0]), driver.add(PROMPTS[1], embeds=embeds)]
        assert driver.generate(seqs, 6, budget=100) == [
            judged("llama", prompt, 6)[0] for prompt in PROMPTS[:2]
        ]
        if vectors:
            assert set(graphs.replayed) == set(shapes if staged else shapes[:1])
        for seq in seqs:
            driver.drop(seq)


@pytest.mark.nightly
@pytest.mark.slow
def test_vectors_reach_a_rank_in_a_child():
    """As bytes of a plan, once for each time that a sequence is new there."""
    executor = MultiprocExecutor()
    try:
        made = CPUEngine(
            FOLDER,
            executor=executor,
            dtype="float32",
            enable_prompt_embeds=True,
            num_gpu_blocks_override=12,
            max_num_batched_tokens=24,
        )
        keys = [made.add_embeds(embeds_for(FOLDER, prompt), 40) for prompt in PROMPTS]
        tokens = made.run()
        assert [tokens[key.request] for key in keys] == [judged("llama", p, 40)[0] for p in PROMPTS]
    finally:
        executor.stop()
