"""The scheduler and its connector: every order of a hand-off's events, on both sides."""

from __future__ import annotations

import pytest
from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.handoff import Connector, ConsumerSide
from tests.engine_plan.pair import D, P, Pair, consume, merged, produce

from tandem.engine.step import ModelRunnerOutput
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.kv import FirstToken, Loaded
from tandem.protocol.requests import Consume, Produce


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", [15, 16, 17, 32, 45])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_handed_over_request_says_what_it_would_alone(n, prompt, overlap):
    """Token 1 from P, repeated by D's first frame, and the rest from D: the oracle's tokens."""
    pair = Pair(max_num_batched_tokens=16, async_scheduling=overlap)
    params = params_of(n=n, temperature=1.0, max_tokens=9)
    pair.prefill("a", prompt, params=params)
    request = pair.reserve("a", prompt, params=params)
    pair.deliver(request)
    pair.d.run()

    for choice in range(n):
        expected, _ = pair.d.oracle(request, choice)
        assert merged(pair, request, choice) == expected
        assert pair.d.tokens("a", choice) == expected
    pair.check_empty()


def test_a_producer_says_token_one_and_ends():
    """P emits token 1 of each choice without an end, tells the peer, and keeps its blocks."""
    pair = Pair()
    params = params_of(n=2, temperature=1.0, ignore_eos=True)

    request = pair.prefill("a", params=params)

    assert [(out.choice, out.position, out.finish) for out in pair.p.outputs] == [
        (0, 0, None),
        (1, 0, None),
    ]
    export = pair.producer.exports[request.key]
    assert (export.upto, export.ended, export.why) == (40, None, "handed_over")
    assert pair.p.core.stats()["held_blocks"] == 3
    assert pair.p.core.load_report().leased_blocks == 3
    assert pair.p.add(produce("a")) is RefusalCode.DUPLICATE
    pair.producer.release(request.key)
    pair.p.run()
    pair.p.check_empty()


@pytest.mark.parametrize("usable", [True, False])
def test_token_one_may_end_it(usable):
    """P tells the peer that token 1 ended it; D says the same and frees all, KV or not."""
    pair = Pair()
    params = params_of(n=2, max_tokens=1)
    request = pair.prefill(params=params)
    export = pair.producer.exports[request.key]
    assert export.ended == "length"
    assert export.first is not None

    leg = consume("a", params=params)
    pair.d.add(leg)
    if usable:
        pair.consumer.ready[leg.key] = 40
        pair.d.step()
        pair.deliver(leg)
    else:
        pair.d.step()
        pair.consumer.events.append(Loaded(leg.key, export.first, usable=False))
        pair.producer.release(leg.key)
    pair.d.run()

    for harness in (pair.p, pair.d):
        assert [out.finish for out in harness.outputs] == ["length", "length"]
    assert bool(pair.d.stored) is usable
    pair.check_empty()


def test_unusable_kv_is_not_cached_and_may_be_kept():
    """When token 1 ended it in mid-load, blocks stay away until the last write has landed."""
    pair = Pair()
    params = params_of(max_tokens=1)
    pair.prefill(params=params)
    request = pair.reserve(params=params)
    first = pair.producer.exports[request.key].first
    assert first is not None
    pair.consumer.keep_on_abort = False
    pair.consumer.events.append(Loaded(request.key, first, usable=False, blocks_free=False))
    pair.producer.release(request.key)
    pair.d.step()

    assert pair.d.finish("a") == "length"
    assert pair.d.core.stats()["held_blocks"] == 4
    assert not pair.d.stored
    pair.consumer.release(request.key)
    pair.check_empty()


def test_a_false_end_fails_closed():
    """Token 1 that is said to end the request and does not is never emitted."""
    pair = Pair()
    request = pair.reserve()
    pair.consumer.keep_on_abort = False
    pair.consumer.events.append(Loaded(request.key, (FirstToken(0, 3),), usable=False))
    pair.d.run()

    assert pair.d.outputs == []
    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    pair.d.check_empty()


@pytest.mark.parametrize("first", [(), (FirstToken(0, 3),), (FirstToken(0, 3), FirstToken(2, 4))])
def test_wrong_first_tokens_fail_closed(first):
    """First tokens of other choices than were asked for end the attempt without a token."""
    pair = Pair()
    request = pair.reserve(params=params_of(n=2, temperature=1.0))
    pair.consumer.loading.discard(request.key)
    pair.consumer.events.append(Loaded(request.key, first, usable=bool(first)))
    pair.d.run()

    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    assert not pair.d.stored
    pair.d.check_empty()


def test_a_first_token_out_of_the_vocabulary_fails_closed():
    """No step of D's model could run with it."""
    pair = Pair()
    request = pair.reserve()
    pair.consumer.loading.discard(request.key)
    pair.consumer.events.append(Loaded(request.key, (FirstToken(0, 1 << 30),)))
    pair.d.run()

    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    assert pair.d.outputs == []
    pair.d.check_empty()


@pytest.mark.parametrize("num_tokens", [41, 48, 1 << 40])
def test_kv_of_a_longer_prompt_fails_closed(num_tokens):
    """Nothing is reserved for it: what is beyond the prompt would be taken for a part of it."""
    pair = Pair()
    request = consume("a")
    assert pair.d.add(request) is None
    pair.consumer.ready[request.key] = num_tokens
    pair.d.run()

    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    assert not [call for call in pair.consumer.calls if call[0] == "begin_load"]
    pair.d.check_empty()


def test_a_first_token_behind_less_than_the_prompt_fails_closed():
    """Token 1 is drawn behind all of a prompt: that of a shorter one is another's."""
    pair = Pair()
    request = consume("a")
    assert pair.d.add(request) is None
    pair.consumer.ready[request.key] = 39
    pair.d.step()
    pair.consumer.loading.discard(request.key)
    pair.consumer.events.append(Loaded(request.key, (FirstToken(0, 3),)))
    pair.d.run()

    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    assert pair.d.outputs == []
    pair.d.check_empty()


def test_kv_that_was_never_reserved_for_fails_closed():
    """A commit for a request without blocks cannot be true."""
    pair = Pair()
    request = consume("a")
    pair.d.add(request)
    pair.consumer.events.append(Loaded(request.key, (FirstToken(0, 3),)))
    pair.d.run()

    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    pair.d.check_empty()


def test_resumed_requests_are_handed_over_too():
    """With forced tokens, P's first token has their number as its position, and D goes on."""
    pair = Pair()
    params = params_of(max_tokens=9, ignore_eos=True)
    whole = request_of("a", 20, params=params)
    expected, _ = pair.d.oracle(whole)
    forced = (tuple(expected[:3]),)
    pair.prefill("a", 20, params=params, emitted=forced)
    request = pair.reserve("a", 20, params=params, emitted=forced)
    pair.deliver(request)
    pair.d.run()

    assert [out.position for out in (*pair.p.outputs, pair.d.outputs[0])] == [3, 3]
    assert merged(pair, request, 0) == expected[3:]
    pair.check_empty()


@pytest.mark.parametrize("kv", [Produce(D), Consume(P)])
def test_what_is_not_handed_over_is_refused(kv):
    """Choices that go on from different tokens, and workers without a hand-off, say so."""
    several = request_of("a", 20, params=params_of(n=2), emitted=((1,), (2,)), kv=kv)

    assert Pair().p.add(several) is RefusalCode.UNSUPPORTED
    assert Harness().add(request_of("a", 20, kv=kv)) is RefusalCode.UNSUPPORTED


@pytest.mark.parametrize("prompt", [31, 32, 40])
@pytest.mark.parametrize("come", [16, 32, 40])
def test_kv_without_token_one_is_completed_here(prompt, come):
    """KV of a part of the prompt, or of all of it without a token: the rest is computed here."""
    come = min(come, prompt)
    harness = Harness(connector=(side := ConsumerSide()))
    source = Harness()
    warm = request_of("a", prompt, params=params_of(max_tokens=1))
    source.add(warm)
    plan = source.core.scheduler.schedule()
    assert plan is not None
    source.executor.execute(plan)
    leg = consume("a", prompt)
    harness.add(leg)
    side.ready[leg.key] = come
    harness.step()

    side.deliver(
        leg.key,
        (),
        source=source.executor,
        blocks=tuple(map(tuple, plan.new[0].block_ids)),
        target=harness.executor,
    )
    harness.run()

    harness.check(leg)
    harness.check_empty()


def test_a_producer_is_looked_up_and_others_pass():
    """A connector that brings nothing leaves an aggregated engine as it was."""
    harness = Harness(connector=(side := Connector()))
    request = request_of("a", 40, params=params_of(prompt_logprobs=0))
    harness.add(request)
    harness.run()

    harness.check(request)
    assert [call for call, _ in side.calls] == ["admit", "started", "finished"]
    harness.check_empty()


def test_results_must_come_in_order():
    """A result of another step than the oldest in flight is a broken executor."""
    harness = Harness()
    harness.add(request_of("a"))
    plan = harness.core.scheduler.schedule()
    assert plan is not None
    good = harness.executor.execute(plan).result()

    with pytest.raises(AssertionError, match="was expected"):
        harness.core.scheduler.update_from_output(ModelRunnerOutput(9, (), good.fence))
