"""Emitted tokens of a resumed request are drawn again and compared; they stand either way."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from tests.engine_plan.builders import VOCAB, Harness, params_of, request_of
from tests.engine_plan.grammars import HandCompiler, constrained
from tests.engine_plan.grammars import run as run_all
from tests.engine_plan.pair import Pair, produce
from tests.engine_plan.plans import next_plan

from tandem.engine.metrics import EngineMetrics
from tandem.engine.step import SpecTokens

DRAWN = params_of(temperature=1.0, max_tokens=40, ignore_eos=True)


def compared(harness):
    """(agreed, compared) tokens since the last look."""
    stats = harness.core.scheduler.take_stats()
    return stats.agreed_tokens, stats.replayed_tokens


def run(harness):
    """Plans until nothing is left; all that had drafts."""
    drafts: list[SpecTokens] = []
    while harness.core.has_work:
        drafts += next_plan(harness).drafts
    return drafts


def emitted_of(harness, count, params=DRAWN):
    """The first tokens of a request that was lost."""
    return tuple(harness.oracle(request_of("a", params=params))[0][:count])


@pytest.mark.parametrize("limit", [1, 5, 16])
def test_an_equal_engine_agrees_with_all(limit):
    """The last tokens, as many as is said, are drawn again as they are."""
    harness = Harness(replay_check_tokens=limit)
    request = request_of("a", params=DRAWN, emitted=(emitted_of(harness, 20),))
    harness.add(request)
    (drafts,) = run(harness)
    assert drafts.emitted == request.emitted[0][-limit:]
    assert compared(harness) == (limit, limit)
    harness.check(request)


def test_a_token_that_would_not_be_drawn_stands():
    """It is counted, and the answer goes on from it."""
    harness = Harness()
    emitted = list(emitted_of(harness, 20))
    emitted[-2] = (emitted[-2] + 1) % VOCAB
    request = request_of("a", params=DRAWN, emitted=(tuple(emitted),))
    harness.add(request)
    run(harness)
    agreed, told = compared(harness)
    assert told == 16
    assert agreed in (14, 15), "the wrong one, and the one drawn behind it"
    harness.check(request)


def test_zero_compares_nothing():
    """No row draws more than once."""
    harness = Harness(replay_check_tokens=0)
    request = request_of("a", params=DRAWN, emitted=(emitted_of(harness, 20),))
    harness.add(request)
    assert run(harness) == []
    assert compared(harness) == (0, 0)
    harness.check(request)


def test_it_costs_no_step_and_no_token():
    """Plans are the same but for the draws."""
    shapes = []
    for limit in (0, 16):
        harness = Harness(replay_check_tokens=limit)
        harness.add(request_of("a", params=DRAWN, emitted=(emitted_of(harness, 20),)))
        rows = []
        while harness.core.has_work:
            rows.append(next_plan(harness).rows)
        shapes.append(rows)
    assert shapes[0] == shapes[1]


def test_only_what_is_computed_again_is_compared():
    """A cached prefix and earlier chunks are as they are."""
    harness = Harness(max_num_batched_tokens=4, max_num_seqs=2)
    request = request_of("a", 10, params=DRAWN, emitted=(emitted_of(harness, 9),))
    harness.add(request)
    (drafts,) = run(harness)
    assert drafts.num_tokens == 2, "19 tokens in chunks of 4: the last one has 3"


def test_every_choice_of_a_resumed_request_is_compared():
    """Each is a sequence of its own; one that has emitted nothing has nothing to compare."""
    harness = Harness()
    params = params_of(temperature=1.0, max_tokens=20, n=3, ignore_eos=True)
    base = request_of("a", params=params)
    tokens = [harness.oracle(base, choice)[0] for choice in range(3)]
    request = request_of(
        "a", params=params, emitted=(tuple(tokens[0][:7]), (), tuple(tokens[2][:3]))
    )
    harness.add(request)
    drafts = run(harness)
    assert sorted(each.num_tokens for each in drafts) == [3, 7]
    assert compared(harness) == (10, 10)
    harness.check(request)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_sequences_are_compared(ahead):
    """They are resumed as any; all tokens agree and nothing changes."""
    harness = Harness(6, async_scheduling=ahead, enable_prefix_caching=False)
    requests = [
        request_of(f"r{i}", 10, params=params_of(max_tokens=60, ignore_eos=True, temperature=1.0))
        for i in range(3)
    ]
    for request in requests:
        harness.add(request)
    agreed = told = 0
    while harness.core.has_work:
        harness.core.advance()
        outputs = harness.core.scheduler.take_stats()
        agreed, told = agreed + outputs.agreed_tokens, told + outputs.replayed_tokens
    assert told == agreed > 0


def test_counted_by_agreement():
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="m", max_model_len=100)
    harness = Harness(metrics=metrics)
    emitted = list(emitted_of(harness, 20))
    emitted[-1] = (emitted[-1] + 1) % VOCAB
    harness.add(request_of("a", params=DRAWN, emitted=(tuple(emitted),)))
    harness.run()
    labels = {"model_name": "m", "engine": "0"}
    name = "tandem:resume_replayed_tokens_total"
    assert registry.get_sample_value(name, {**labels, "agreed": "true"}) == 15
    assert registry.get_sample_value(name, {**labels, "agreed": "false"}) == 1


def test_a_prefill_worker_compares_what_it_computes_again():
    """The token that it hands over is the one behind the last that was emitted."""
    pair = Pair()
    forced = (emitted_of(pair.p, 12),)
    leg = produce("a", 20, params=DRAWN, emitted=forced)
    assert pair.p.add(leg) is None
    (drafts,) = next_plan(pair.p).drafts
    assert drafts.emitted == forced[0]
    assert compared(pair.p) == (12, 12)
    request = pair.reserve("a", 20, params=DRAWN, emitted=forced)
    pair.deliver(request)
    pair.d.run()
    pair.d.check(request)
    pair.check_empty()


def test_answers_under_a_grammar_are_not_compared():
    """A mask is of one position: such a request is resumed as if nothing were to compare."""
    harness = Harness(gate=HandCompiler().gate)
    params = constrained("1 2 3 4 5 6|1 2 9", temperature=1.0)
    assert harness.add(request_of("a", params=params, emitted=((1, 2, 3),))) is None
    run_all(harness)
    assert harness.tokens("a") == [4, 5, 6]
    assert harness.finish("a") == "stop"
