"""The scheduler and its connector: every order of a hand-off's events, on both sides."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.handoff import Connector, ConsumerSide, ProducerSide

from tandem.engine.scheduler.connector import FirstToken, Loaded, Released
from tandem.engine.scheduler.output import Fence, ModelRunnerOutput
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.ids import Incarnation
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce

P, D = Incarnation(b"p" * 16), Incarnation(b"d" * 16)


def produce(name: str, prompt: Any = 40, **fields: Any) -> EngineCoreRequest:
    """The prefill leg of a request."""
    return request_of(name, prompt, kv=Produce(D), **fields)


def consume(name: str, prompt: Any = 40, **fields: Any) -> EngineCoreRequest:
    """The decode leg of a request."""
    return request_of(name, prompt, kv=Consume(P), **fields)


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, p_blocks: int = 64, d_blocks: int = 64, **flat: Any) -> None:
        self.producer, self.consumer = ProducerSide(), ConsumerSide()
        self.p = Harness(p_blocks, connector=self.producer, **flat)
        self.d = Harness(d_blocks, connector=self.consumer, **flat)

    def prefill(self, name: str = "a", prompt: Any = 40, **fields: Any) -> EngineCoreRequest:
        """Run the prefill leg to its end; its blocks stay exported."""
        request = produce(name, prompt, **fields)
        assert self.p.add(request) is None
        for _ in range(100):
            if self.p.core.holds(request.key):
                self.p.step()
        assert not self.p.core.holds(request.key)
        return request

    def reserve(self, name: str = "a", prompt: Any = 40, **fields: Any) -> EngineCoreRequest:
        """Start the decode leg up to its load."""
        request = consume(name, prompt, **fields)
        assert self.d.add(request) is None
        self.consumer.ready[request.key] = len(self.prompt_of(request))
        self.d.step()
        return request

    @staticmethod
    def prompt_of(request: EngineCoreRequest) -> list[int]:
        """Prompt and forced tokens of the first choice."""
        return [*request.prompt_token_ids, *request.emitted_of(0)]

    def deliver(self, request: EngineCoreRequest) -> None:
        """Bring the KV of a request and end its lease."""
        export = self.producer.exports[request.key]
        assert export.first is not None
        self.consumer.deliver(
            request.key,
            export.first,
            source=self.p.executor,
            blocks=export.block_ids,
            target=self.d.executor,
        )
        self.producer.release(request.key)

    def check_empty(self) -> None:
        """Both engines hold nothing, and finished() was called once for each admitted key."""
        for harness in (self.p, self.d):
            harness.run()
            harness.check_empty()
        for side in (self.producer, self.consumer):
            admitted = sorted(key for call, key in side.calls if call == "admit")
            finished = sorted(key for call, key in side.calls if call == "finished")
            assert admitted == finished


def merged(pair: Pair, request: EngineCoreRequest, choice: int) -> list[int]:
    """The router's log of one choice: first write wins, and rewrites must agree."""
    log: dict[int, int] = {}
    outputs: list[EngineCoreOutput] = [*pair.p.outputs, *pair.d.outputs]
    for output in outputs:
        if (output.request, output.choice) == (request.key.request, choice):
            for offset, token in enumerate(output.token_ids):
                assert log.setdefault(output.position + offset, token) == token
    return [token for _, token in sorted(log.items())]


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


def test_kv_that_was_never_reserved_for_fails_closed():
    """A commit for a request without blocks cannot be true."""
    pair = Pair()
    request = consume("a")
    pair.d.add(request)
    pair.consumer.events.append(Loaded(request.key, (FirstToken(0, 3),)))
    pair.d.run()

    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    pair.d.check_empty()


def test_only_what_is_missing_is_loaded():
    """D pins its own prefix and asks for the rest; a full hit asks for token 1 alone."""
    pair = Pair()
    prompt = list(range(48))
    warm = request_of("warm", [*prompt[:40], 9, 9, 9])
    pair.d.add(warm)
    pair.d.run()
    pair.prefill("a", prompt)
    first = pair.reserve("a", prompt)
    assert pair.consumer.loads[first.key] == ((0, 1, 3, 4), range(32, 48))
    assert pair.consumer.local[first.key] == 32
    pair.deliver(first)
    pair.d.run()

    pair.prefill("b", prompt)
    second = pair.reserve("b", prompt)
    assert pair.consumer.loads[second.key][1] == range(48, 48)
    pair.deliver(second)
    pair.d.run()

    for request in (first, second):
        pair.d.check(request)
    pair.check_empty()


def test_a_parked_request_blocks_nobody():
    """While one waits for its KV, later requests run; when it comes, it joins."""
    pair = Pair()
    parked = consume("late")
    pair.d.add(parked)
    other = request_of("now")
    pair.d.add(other)
    for _ in range(12):
        pair.d.step()
    pair.d.check(other)

    pair.prefill("late")
    pair.consumer.ready[parked.key] = 40
    pair.d.step()
    pair.deliver(parked)
    pair.d.run()

    pair.d.check(parked)
    pair.check_empty()


def test_short_blocks_keep_it_parked():
    """A ready request for which blocks are short waits, others go on, and it is tried again."""
    pair = Pair(d_blocks=6)
    other = request_of("now", 20, params=params_of(max_tokens=45, ignore_eos=True))
    pair.d.add(other)
    for _ in range(20):
        pair.d.step()
    pair.prefill()
    request = pair.reserve()
    assert request.key not in pair.consumer.loads

    while request.key not in pair.consumer.loads:
        pair.d.step()
    pair.d.check(other)
    pair.deliver(request)
    pair.d.run()
    pair.d.check(request)
    pair.check_empty()


def test_seats_are_kept_for_what_loads():
    """A loading request has its seat already: the batch never grows beyond its rows."""
    pair = Pair(max_num_seqs=1)
    pair.prefill("a")
    first = pair.reserve("a")
    pair.d.add(request_of("b"))
    second = consume("c")
    pair.d.add(second)
    pair.consumer.ready[second.key] = 40
    pair.d.step()
    assert pair.d.core.stats()["waiting"] == pair.d.core.stats()["parked"] == 1

    pair.deliver(first)
    while second.key not in pair.consumer.loads:
        pair.d.step()
    pair.prefill("c")
    pair.deliver(second)
    pair.d.run()
    for request in (first, second, request_of("b")):
        pair.d.check(request)
    pair.check_empty()


def test_decode_headroom_is_reserved():
    """A prompt that fills its blocks gets one more to decode into, before the load begins."""
    pair = Pair()
    pair.prefill("a", 32)
    request = pair.reserve("a", 32)

    assert len(pair.consumer.loads[request.key][0]) == 3
    pair.deliver(request)
    pair.d.run()
    pair.check_empty()


def test_a_prompt_that_fills_the_pool_still_loads():
    """Headroom is not asked for where the whole pool has none to give."""
    pair = Pair(d_blocks=3)
    pair.prefill("a", 40)
    request = pair.reserve("a", 40)

    assert len(pair.consumer.loads[request.key][0]) == 3
    pair.deliver(request)
    pair.d.run()
    pair.d.check(request)
    pair.check_empty()


@pytest.mark.parametrize("blocks_free", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_failed_load_says_so_and_frees(begun, blocks_free):
    """FAIL with the connector's cause; blocks that may still be written wait for Released."""
    pair = Pair()
    request = consume("a")
    pair.d.add(request)
    if begun:
        pair.consumer.ready[request.key] = 40
    pair.d.step()
    pair.consumer.keep_on_abort = False

    pair.consumer.fail(request.key, blocks_free=blocks_free)
    pair.d.step()

    assert [(each.cause, each.message) for each in pair.d.failed] == [
        (FailCause.PEER, "the peer is gone")
    ]
    if not blocks_free:
        assert pair.d.core.stats()["held_blocks"] == (4 if begun else 0)
        pair.consumer.release(request.key)
    pair.check_empty()


def test_an_abort_in_mid_load_waits_for_the_writes():
    """Blocks of an aborted load are not given to anybody before the connector lets go."""
    pair = Pair(d_blocks=6)
    request = pair.reserve()

    assert pair.d.core.abort(request.key)
    assert pair.d.core.stats()["free_blocks"] == 2
    assert pair.d.core.has_work
    other = request_of("b", 60)
    pair.d.add(other)
    assert not pair.d.step().progressed
    pair.consumer.release(request.key)
    pair.d.run()

    pair.d.check(other)
    pair.check_empty()


def test_an_abort_before_anything_was_reserved_is_quiet():
    """A parked request that is aborted leaves at once; what comes later is counted and dropped."""
    pair = Pair()
    request = consume("a")
    pair.d.add(request)
    pair.d.step()
    pair.d.core.abort(request.key)

    pair.consumer.events += [Loaded(request.key, (FirstToken(0, 1),)), Released(request.key)]
    pair.consumer.fail(request.key)
    plan = pair.d.core.scheduler.plan()

    assert plan is None
    assert pair.d.core.scheduler.take_stats().late_events == 3
    assert (pair.d.outputs, pair.d.failed) == ([], [])
    pair.check_empty()


def test_a_commit_for_a_running_request_is_late():
    """A second Loaded for the same key changes nothing."""
    pair = Pair()
    pair.prefill()
    request = pair.reserve()
    pair.deliver(request)
    pair.d.step()
    pair.consumer.events.append(Loaded(request.key, (FirstToken(0, 49),)))
    pair.d.run()

    pair.d.check(request)
    pair.check_empty()


def test_budgets_end_parked_and_loading_requests():
    """A request whose KV does not come in time fails with TIMEOUT, wherever it waits."""
    pair = Pair()
    parked, loading = consume("a", budget_ms=50), consume("b", budget_ms=50)
    for request in (parked, loading):
        pair.d.add(request)
    pair.consumer.ready[loading.key] = 40
    pair.d.step()
    pair.d.clock.now += 1
    pair.d.step()

    assert {each.cause for each in pair.d.failed} == {FailCause.TIMEOUT}
    assert len(pair.d.failed) == 2
    pair.consumer.release(loading.key)
    pair.check_empty()


def test_a_load_waits_for_steps_that_may_still_write():
    """Blocks freed while a step in flight writes them are not loaded into before it is through."""
    pair = Pair(d_blocks=4, async_scheduling=True)
    long = request_of("long", 30, params=params_of(max_tokens=20, ignore_eos=True))
    pair.d.add(long)
    core = pair.d.core
    scheduler, execute = core.scheduler, pair.d.executor.execute
    plan = scheduler.plan()
    assert plan is not None
    output = execute(plan).result()
    request = consume("a", 30)
    pair.d.add(request)
    pair.consumer.ready[request.key] = 30
    core.abort(long.key)

    assert scheduler.plan() is None
    assert core.stats()["loading"] == 1
    assert request.key not in pair.consumer.loads
    scheduler.settle(output)
    assert request.key in pair.consumer.loads


class SlowFence:
    """A fence that is done when the test says so."""

    def __init__(self) -> None:
        self.landed = False

    def done(self) -> bool:
        """Whether the writes have landed."""
        return self.landed


def test_fences_travel_with_what_they_fence():
    """P's chunks carry the fence of their own step; D's loads wait for the last step's fence."""
    pair = Pair(max_num_batched_tokens=16)
    fences: list[Fence] = []

    def make_fence(_plan: object) -> Fence:
        fences.append(SlowFence())
        return fences[-1]

    for harness in (pair.p, pair.d):
        harness.executor._make_fence = make_fence
    request = pair.prefill()
    assert pair.producer.exports[request.key].fences == fences

    other = request_of("b", 5, params=params_of(max_tokens=4, ignore_eos=True))
    pair.d.add(other)
    pair.d.step()
    leg = pair.reserve()
    assert leg.key not in pair.consumer.loads
    for fence in fences:
        assert isinstance(fence, SlowFence)
        fence.landed = True
    pair.d.step()
    assert leg.key in pair.consumer.loads


def test_chunks_are_announced_as_they_are_computed():
    """A cached prefix comes with the first chunk; then each step's tokens, without gaps."""
    pair = Pair(max_num_batched_tokens=16)
    prompt = list(range(50)) + list(range(10))
    pair.p.add(request_of("warm", prompt[:33]))
    pair.p.run()
    request = produce("a", prompt)
    pair.p.add(request)

    upto = []
    for _ in range(2):
        pair.p.step()
        upto.append(pair.producer.exports[request.key].upto)

    assert upto == [48, 60]


def test_a_producer_is_never_preempted():
    """Its prompt's blocks are its own until it ends, whatever others need."""
    pair = Pair(p_blocks=6, max_num_batched_tokens=16)
    other = request_of("b", 16, params=params_of(max_tokens=60, ignore_eos=True))
    pair.p.add(other)
    pair.p.step()
    request = pair.prefill("a", 60)

    assert pair.producer.exports[request.key].upto == 60
    pair.producer.release(request.key)
    pair.p.run()
    pair.p.check(other)
    pair.check_empty()


def test_quotas_refuse_or_hold_back_a_producer():
    """A full quota refuses; a lease that may not start yet parks and blocks nobody."""
    pair = Pair()
    pair.producer.quota = 1
    first, second = produce("a"), produce("b")
    pair.producer.may_start = False
    assert pair.p.add(first) is None
    assert pair.p.add(second) is RefusalCode.CAPACITY
    other = request_of("c")
    pair.p.add(other)
    for _ in range(12):
        pair.p.step()
    pair.p.check(other)
    assert pair.producer.exports[first.key].upto == 0

    pair.producer.may_start = True
    pair.p.step()
    assert pair.producer.exports[first.key].upto == 40
    pair.producer.release(first.key)
    pair.check_empty()


def test_a_revoked_producer_stops():
    """A lease revoked in mid-prompt fails the attempt; its blocks wait for Released."""
    pair = Pair(max_num_batched_tokens=16)
    request = produce("a", 60)
    pair.p.add(request)
    pair.p.step()
    revoked = ConsumerSide()
    revoked.fail(request.key, blocks_free=False)
    pair.producer.events += revoked.events
    pair.p.step()

    assert [each.request for each in pair.p.failed] == ["a"]
    assert pair.p.core.stats()["held_blocks"] == 4
    pair.producer.release(request.key)
    pair.check_empty()


def test_aborted_producers_keep_their_promise():
    """An abort in mid-prompt hands the blocks to the connector, which frees them when it may."""
    pair = Pair(max_num_batched_tokens=16)
    request = produce("a", 60)
    pair.p.add(request)
    pair.p.step()

    pair.p.core.abort(request.key)

    assert pair.producer.exports[request.key].why == "abort"
    assert pair.p.core.stats()["held_blocks"] == 4
    pair.producer.release(request.key)
    pair.check_empty()


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
    plan = source.core.scheduler.plan()
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
        blocks=plan.new[0].block_ids,
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
    assert [call for call, _ in side.calls] == ["admit", "finished"]
    harness.check_empty()


def test_results_must_come_in_order():
    """A result of another step than the oldest in flight is a broken executor."""
    harness = Harness()
    harness.add(request_of("a"))
    plan = harness.core.scheduler.plan()
    assert plan is not None
    good = harness.executor.execute(plan).result()

    with pytest.raises(AssertionError, match="was expected"):
        harness.core.scheduler.settle(ModelRunnerOutput(9, (), good.fence))
