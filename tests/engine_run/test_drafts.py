"""Rows of several tokens over a real model: no token changes, emitted ones are drawn again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import pytest
from tests.engine_run.cpu_engine import GREEDY, ROUTER, CPUEngine
from tests.engine_run.drafting import Guesses, guess
from tests.engine_run.tiny_models import folder_of

from tandem.engine.executor.multiproc import MultiprocExecutor
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineCoreOutput, TokenLogprobs
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import PENALTY_RANGE, SamplingParams, ThinkingMarks

PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(25 + 9 * each)] for each in range(4)]
COUNT = 30
VOCAB = 320
DRAFTS = json.dumps(
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
)
PARAMS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=11),
    "penalties": SamplingParams(
        temperature=0.8,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        bad_words_token_ids=((7, 9), (100,)),
    ),
    "logprobs": SamplingParams(temperature=0.9, seed=3, logprobs=3),
    "bias": SamplingParams(
        temperature=0.0, seed=0, logit_bias={20: 3.0}, min_tokens=20, stop_token_ids=(20, 21)
    ),
}


def engine(**settings) -> CPUEngine:
    return CPUEngine(folder_of("llama"), **{"num_gpu_blocks_override": 40} | settings)


def step(engine: CPUEngine) -> Iterator[EngineCoreOutput]:
    """One step; what it said of tokens."""
    for outputs in engine.core.advance().outputs.values():
        for each in outputs:
            assert isinstance(each, EngineCoreOutput)
            yield each


def told_by(
    engine: CPUEngine,
) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]], int]:
    """Return tokens and scores by request, and the number of accepted drafts."""
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[TokenLogprobs]] = {}
    accepted = 0
    while engine.core.has_work:
        for each in step(engine):
            mine = tokens.setdefault(each.request, [])
            assert each.position == len(mine)
            mine.extend(each.token_ids)
            scores.setdefault(each.request, []).extend(each.logprobs or ())
        accepted += engine.core.scheduler.take_stats().accepted_tokens
    return tokens, scores, accepted


def ready(name: str, **settings) -> CPUEngine:
    """An engine with all prompts, to be continued by the parameters of this name."""
    made = engine(**settings)
    for prompt in PROMPTS:
        made.add(prompt, COUNT, PARAMS[name])
    return made


@cache
def undrafted(name: str) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]:
    return told_by(ready(name))[:2]


def guesses_of(tokens: dict[str, list[int]], wrong_every: int) -> Guesses:
    answers = [(prompt, tokens[f"r{at}"]) for at, prompt in enumerate(PROMPTS)]
    return Guesses(answers, wrong_every)


def check_drafted(name: str, drafted: CPUEngine, *, wrong_every: int) -> int:
    """Compare tokens and scores with those of steps without drafts; return the accepted drafts."""
    tokens, scores = undrafted(name)
    guess(drafted, guesses_of(tokens, wrong_every))
    again, scores_again, accepted = told_by(drafted)
    drafted.core.close()
    assert again == tokens
    for request, expected in scores.items():
        found = scores_again[request]
        assert [each.top_ids for each in found] == [each.top_ids for each in expected]
        want = [pytest.approx(each.logprob, abs=1e-4) for each in expected]
        assert [each.logprob for each in found] == want
    return accepted


@pytest.mark.full
@pytest.mark.parametrize("wrong_every", [3, 100])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", PARAMS)
def test_drafts_change_no_token(name, overlap, wrong_every):
    drafted = ready(name, async_scheduling=overlap, speculative_config=DRAFTS)
    accepted = check_drafted(name, drafted, wrong_every=wrong_every)
    assert accepted > (60 if wrong_every == 100 else 10)


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_under_preemption(overlap):
    """Fewer blocks than all need: a sequence resumed with accepted tokens goes on."""
    settings = {"num_gpu_blocks_override": 11, "max_num_batched_tokens": 48}
    drafted = ready("penalties", async_scheduling=overlap, speculative_config=DRAFTS, **settings)
    assert check_drafted("penalties", drafted, wrong_every=4)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_drafts_beside_scored_prompts_and_forks(model):
    """Steps with drafts, a prompt that is scored and one that draws for several choices."""
    other = SamplingParams(temperature=0.7, seed=9, prompt_logprobs=1, n=3, max_tokens=5)
    made: list[list[EngineCoreOutput]] = []
    for drafts in (None, DRAFTS):
        each = CPUEngine(
            folder_of(model),
            num_gpu_blocks_override=200,
            speculative_config=drafts,
            async_scheduling=drafts is not None,
        )
        each.add(PROMPTS[0], COUNT, PARAMS["seeded"])
        if made:
            tokens = [t for out in made[0] if out.request == "r0" for t in out.token_ids]
            guess(each, Guesses([(PROMPTS[0], tokens)], wrong_every=4))
        outputs: list[EngineCoreOutput] = []
        for number in range(100):
            if number == 4:
                key = RequestKey(ROUTER, "other", 0)
                request = EngineCoreRequest(key=key, prompt_token_ids=PROMPTS[1], params=other)
                assert each.core.add(request) is None
            outputs += step(each)
            if not each.core.has_work:
                break
        made.append(outputs)
    assert tokens_by_choice(made[0]) == tokens_by_choice(made[1])
    prompts = [[out.prompt_logprobs for out in told if out.prompt_logprobs] for told in made]
    assert [[each and each.token_id for each in scores] for scores in prompts[0]] == [
        [each and each.token_id for each in scores] for scores in prompts[1]
    ]


def tokens_by_choice(outputs: list[EngineCoreOutput]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for each in outputs:
        found.setdefault((each.request, each.choice), []).extend(each.token_ids)
    return found


def resumed(engine: CPUEngine, params: SamplingParams, emitted: tuple[int, ...]):
    """Tokens after ``emitted``; tokens that agreed, and that were compared."""
    fields = {each: getattr(params, each) for each in params.__struct_fields__}
    wanted = SamplingParams(**{**fields, "max_tokens": COUNT, "ignore_eos": True})
    key = RequestKey(ROUTER, "again", 1)
    request = EngineCoreRequest(
        key=key, prompt_token_ids=PROMPTS[0], params=wanted, emitted=(emitted,)
    )
    assert engine.core.add(request) is None
    tokens: list[int] = []
    while engine.core.has_work:
        for each in step(engine):
            assert each.position == len(emitted) + len(tokens)
            tokens.extend(each.token_ids)
    stats = engine.core.scheduler.take_stats()
    return tokens, stats.agreed_tokens, stats.replayed_tokens


@pytest.mark.parametrize("name", PARAMS)
def test_a_resume_agrees_with_what_was_emitted(name):
    """The same engine draws every compared token again, under every rule; the answer goes on."""
    params = PARAMS[name]
    (whole,) = engine().generate([PROMPTS[0]], COUNT, params)
    tokens, agreed, compared = resumed(engine(), params, tuple(whole[:20]))
    assert tokens == whole[20:]
    assert (agreed, compared) == (16, 16)


@pytest.mark.parametrize("known", [6, 20])
def test_where_a_thought_was_bounded_nothing_is_compared(known):
    """A rank forgets what ended it, and would draw something else there; the answer goes on."""
    marks = ThinkingMarks(close=9, has_begun=True)
    params = SamplingParams(temperature=1.0, seed=7, thinking_token_budget=5, thinking=marks)
    (whole,) = engine().generate([PROMPTS[0]], COUNT, params)
    assert whole[5] == 9
    tokens, agreed, compared = resumed(engine(), params, tuple(whole[:known]))
    assert tokens == whole[known:]
    assert (agreed, compared) == (0, 0)


@pytest.mark.parametrize("penalty", PENALTY_RANGE)
def test_the_least_and_the_largest_penalty_lift_no_other_rule(penalty):
    """What is not allowed stays forbidden under them, though a prompt or an answer has it."""
    for temperature in (0.0, 1e-5, 1.0):
        params = SamplingParams(
            temperature=temperature,
            seed=7,
            top_p=0.9,
            repetition_penalty=penalty,
            allowed_token_ids=(11, 12, 13),
        )
        (tokens,) = engine().generate([list(range(5, 40))], 8, params.verify())
        assert {11, 12, 13}.issuperset(tokens)


def test_a_token_that_would_not_be_drawn_stands():
    """It is counted as disagreed, and the answer goes on as it does when nothing is compared."""
    (whole,) = engine().generate([PROMPTS[0]], COUNT)
    forced = (*whole[:12], (whole[12] + 1) % VOCAB)
    silent, *_ = resumed(engine(replay_check_tokens=0), GREEDY, forced)
    tokens, agreed, compared = resumed(engine(), GREEDY, forced)
    assert tokens == silent
    assert (agreed, compared) == (12, 13)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_drafts_reach_a_rank_in_another_process(monkeypatch):
    """Plans and results with drafts as bytes: the same tokens, and the same comparison."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (whole,) = engine().generate([PROMPTS[0]], COUNT, PARAMS["penalties"])
    other = CPUEngine(
        folder_of("llama"),
        executor=MultiprocExecutor(),
        num_gpu_blocks_override=40,
        speculative_config=DRAFTS,
    )
    try:
        prompt = [*PROMPTS[0], *whole, *PROMPTS[0]]
        (plain,) = engine().generate([prompt], COUNT, PARAMS["penalties"])
        other.add(prompt, COUNT, PARAMS["penalties"])
        tokens, *_ = told_by(other)
        assert tokens == {"r0": plain}
        rest, agreed, compared = resumed(other, PARAMS["penalties"], tuple(whole[:20]))
        assert rest == whole[20:]
        assert agreed == compared > 0
    finally:
        other.core.close()
