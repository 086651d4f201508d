"""What a step holds: budget, order, chunks, preemption, forks; by exact rows and block ids."""

import pytest
from tests.engine_plan.builders import EOS, VOCAB, Harness, params_of, request_of

from tandem.engine.request import Request
from tandem.engine.scheduler.output import SchedulerOutput
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.finish import FinishReason


def next_plan(harness: Harness) -> SchedulerOutput:
    """The next step's plan, run and settled."""
    plan = harness.core.scheduler.plan()
    assert plan is not None
    output = harness.executor.execute(plan).result()
    harness.core.scheduler.settle(output)
    outputs, _ = harness.core.scheduler.outbox.take()
    harness.outputs += [each for batch in outputs.values() for each in batch]
    return plan


def shape_of(plan: SchedulerOutput) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """(sequence, first token, tokens, choices to draw) of each row."""
    return [
        (int(row.seq), row.num_computed, row.num_tokens, row.sample_choices) for row in plan.rows
    ]


def long_running(**fields):
    """Parameters of a request that goes on until its length ends it."""
    return params_of(ignore_eos=True, **fields)


def test_prompts_are_cut_to_the_budget():
    """A long prompt runs in chunks; only the last one draws, and all blocks come at the start."""
    harness = Harness(max_num_batched_tokens=32)
    harness.add(request_of("a", 70))

    first, second, third, fourth = (next_plan(harness) for _ in range(4))

    assert shape_of(first) == [(0, 0, 32, ())]
    assert first.new[0].block_ids == [0, 1, 2, 3, 4]
    assert shape_of(second) == [(0, 32, 32, ())]
    assert second.new == ()
    assert shape_of(third) == [(0, 64, 6, (0,))]
    assert shape_of(fourth) == [(0, 70, 1, (0,))]


def test_decodes_go_before_chunks_and_share_the_budget():
    """A running decode gets its token first; the prompts of several requests take the rest."""
    harness = Harness(max_num_batched_tokens=16)
    harness.add(request_of("a", 4, params=long_running()))
    next_plan(harness)
    harness.add(request_of("b", 20))
    harness.add(request_of("c", 9))

    assert shape_of(next_plan(harness)) == [(0, 4, 1, (0,)), (1, 0, 15, ())]
    assert shape_of(next_plan(harness)) == [(0, 5, 1, (0,)), (1, 15, 5, (0,)), (2, 0, 9, (0,))]


def test_long_prompts_leave_room_for_others():
    """The threshold bounds one prompt's chunk, so that a short one starts in the same step."""
    harness = Harness(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    harness.add(request_of("a", 30))
    harness.add(request_of("b", 5))

    assert shape_of(next_plan(harness)) == [(0, 0, 8, ()), (1, 0, 5, (0,))]


def test_seats_bound_the_batch():
    """No more sequences run than the ranks have rows for."""
    harness = Harness(max_num_seqs=2)
    for name in "abc":
        harness.add(request_of(name, 5, params=long_running(max_tokens=3)))

    assert len(next_plan(harness).rows) == 2
    harness.run()
    for request in harness.requests.values():
        harness.check(request)


def test_a_cached_prefix_is_not_computed():
    """A second request with the same prompt starts after the blocks that are cached, shares them,
    and says how many tokens it saved."""
    harness = Harness()
    prompt = list(range(40))
    harness.add(request_of("a", prompt))
    harness.run()
    harness.add(request_of("b", prompt))

    plan = next_plan(harness)

    assert shape_of(plan) == [(1, 32, 8, (0,))]
    assert plan.new[0].block_ids[:2] == [0, 1]
    harness.run()
    harness.check(request_of("b", prompt))
    cached = {out.request: out.num_cached_tokens for out in harness.outputs if out.position == 0}
    assert cached == {"a": 0, "b": 32}
    assert all(out.num_cached_tokens is None for out in harness.outputs if out.position)


def test_generated_tokens_are_cached_too():
    """The next turn of a conversation finds the answer to the last one in the cache."""
    harness = Harness()
    first = request_of("a", 20, params=long_running(max_tokens=30))
    harness.add(first)
    harness.run()
    harness.add(request_of("b", [*first.prompt_token_ids, *harness.tokens("a"), 1, 2]))

    assert shape_of(next_plan(harness))[0][1] == 48


def test_salts_keep_caches_apart():
    """Equal prompts under different salts share nothing."""
    harness = Harness()
    harness.add(request_of("a", list(range(40)), cache_salt="one"))
    harness.run()
    harness.add(request_of("b", list(range(40)), cache_salt="two"))

    assert shape_of(next_plan(harness))[0][1] == 0


def test_sent_hashes_are_taken_when_complete():
    """The router's hashes name the blocks; an incomplete list is computed here instead."""
    harness = Harness()
    prompt = list(range(40))
    harness.add(request_of("a", prompt, block_hashes=(b"x" * 16, b"y" * 16)))
    harness.run()
    assert {b"x" * 16, b"y" * 16} <= harness.stored

    harness.add(request_of("b", prompt, block_hashes=(b"x" * 16,)))
    assert shape_of(next_plan(harness))[0][1] == 0


def test_preemption_takes_the_latest_and_computes_it_again():
    """When blocks run out, the request that came last gives its own back, and says the same."""
    harness = Harness(4)
    for name in "ab":
        harness.add(request_of(name, 16, params=long_running(max_tokens=40)))
    plans = [next_plan(harness)]
    while not plans[-1].dropped:
        plans.append(next_plan(harness))

    assert plans[-1].dropped == (1,)
    assert shape_of(plans[-1]) == [(0, 32, 1, (0,))]
    assert plans[-1].rows[0].new_block_ids == (3,)
    harness.run()
    for request in harness.requests.values():
        harness.check(request)
    harness.check_empty()


def test_a_token_in_flight_holds_back_its_preempted_sequence():
    """A sequence preempted while a step still draws its token starts again only with that token."""
    harness = Harness(2)
    first, second = (
        request_of(name, size, params=long_running()) for name, size in (("a", 15), ("b", 16))
    )
    harness.add(first)
    harness.add(second)
    scheduler, execute = harness.core.scheduler, harness.executor.execute
    plans = [scheduler.plan(), scheduler.plan()]
    outputs = [execute(plan).result() for plan in plans if plan is not None]
    assert harness.core.stats()["waiting"] == 1

    harness.core.abort(first.key)
    assert scheduler.plan() is None
    for output in outputs:
        scheduler.settle(output)
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.new[0].token_ids) == 17
    scheduler.settle(execute(plan).result())
    harness.run()
    harness.check(second)


def test_priority_decides_who_runs_and_who_is_preempted():
    """Under the priority policy a lower number starts first and keeps its blocks."""
    harness = Harness(4, policy="priority")
    harness.add(request_of("a", 16, params=long_running(max_tokens=40), priority=5))
    harness.add(request_of("b", 16, params=long_running(max_tokens=40), priority=1))

    first = next_plan(harness)
    assert [new.seq for new in first.new] == [1, 0]
    harness.run()
    ended = [out.request for out in harness.outputs if out.finish is not None]
    assert ended == ["b", "a"]
    for request in harness.requests.values():
        harness.check(request)


def test_an_urgent_latecomer_goes_before_those_that_run():
    """Its rows come first, and those that run already are the ones to be preempted for it."""
    harness = Harness(4, policy="priority")
    params = long_running(max_tokens=40)
    harness.add(request_of("a", 16, params=params, priority=5))
    next_plan(harness)
    harness.add(request_of("b", 16, params=params, priority=1))
    next_plan(harness)

    assert [row.seq for row in next_plan(harness).rows] == [1, 0]
    harness.run()
    ended = [out.request for out in harness.outputs if out.finish is not None]
    assert ended == ["b", "a"]


def test_fcfs_knows_no_priority():
    """By arrival alone, unless the policy says otherwise."""
    harness = Harness()
    harness.add(request_of("a", 16, priority=5))
    harness.add(request_of("b", 16, priority=1))

    assert [new.seq for new in next_plan(harness).new] == [0, 1]


def test_a_head_without_room_waits_for_it():
    """The first in the queue is not overtaken by a smaller one behind it."""
    harness = Harness(5)
    harness.add(request_of("a", 40, params=long_running(max_tokens=4)))
    next_plan(harness)
    harness.add(request_of("b", 60, params=long_running(max_tokens=4)))
    harness.add(request_of("c", 5))

    assert len(next_plan(harness).rows) == 1
    harness.run()
    order = [out.request for out in harness.outputs if out.position == 0]
    assert order == ["a", "b", "c"]


def test_the_watermark_holds_back_new_requests_only():
    """Spare blocks are not given to a newcomer while others run, and never block the only one."""
    harness = Harness(10, watermark=0.3)
    harness.add(request_of("a", 16 * 9, params=long_running(max_tokens=4)))
    while harness.core.scheduler.num_waiting:
        next_plan(harness)
    assert harness.core.manager.num_free == 1

    harness.add(request_of("b", 5))
    harness.run()
    assert [out.request for out in harness.outputs if out.position == 0] == ["a", "b"]


def test_choices_fork_after_one_prefill():
    """Three choices cost one prompt; the children share its full blocks and copy the last."""
    harness = Harness()
    request = request_of("a", 20, params=long_running(n=3, temperature=1.0))
    harness.add(request)

    prefill, decode = next_plan(harness), next_plan(harness)

    assert shape_of(prefill) == [(0, 0, 20, (0, 1, 2))]
    assert shape_of(decode) == [(0, 20, 1, (0,)), (1, 20, 1, (1,)), (2, 20, 1, (2,))]
    assert decode.block_copies == ((1, 2), (1, 3))
    assert [new.block_ids for new in decode.new] == [[0, 2], [0, 3]]
    assert [new.token_ids[-1] for new in decode.new] == [
        harness.tokens("a", choice)[0] for choice in (1, 2)
    ]
    harness.run()
    harness.check(request)
    harness.check_empty()


def test_children_without_room_are_computed_again():
    """A fork that finds no free block, or no seat, waits and recomputes its prompt."""
    for settings in ({"num_blocks": 2}, {"num_blocks": 16, "max_num_seqs": 2}):
        harness = Harness(**settings)
        request = request_of("a", 20, params=long_running(n=3, temperature=1.0, max_tokens=6))
        harness.add(request)

        harness.run()

        harness.check(request)
        harness.check_empty()


def test_choices_that_end_with_token_one_leave_the_others():
    """A child whose first token is the end needs no blocks, and its siblings go on."""
    harness = Harness()
    lengths = set()
    for seed in range(40):
        request = request_of(
            f"s{seed}",
            20,
            params=params_of(n=8, temperature=1.0, seed=seed, stop_token_ids=tuple(range(20))),
        )
        harness.add(request)
        harness.run()
        harness.check(request)
        lengths |= {len(harness.tokens(f"s{seed}", choice)) for choice in range(8)}
    harness.check_empty()
    assert {1, 2, 3} <= lengths


def test_resumed_choices_go_on_from_their_own_tokens():
    """Forced tokens are not emitted again; positions count on, and finished choices stay so."""
    harness = Harness()
    params = long_running(n=3, temperature=1.0, max_tokens=10)
    whole = request_of("a", 20, params=params)
    expected = [harness.oracle(whole, choice)[0] for choice in range(3)]
    resumed = request_of(
        "b", whole.prompt_token_ids, params=params,
        emitted=(tuple(expected[0][:4]), (), tuple(expected[2][:7])), finished_choices=(1,),
    )  # fmt: skip

    harness.add(resumed)
    harness.run()

    assert harness.tokens("b", 0) == expected[0][4:]
    assert harness.tokens("b", 2) == expected[2][7:]
    assert harness.tokens("b", 1) == []
    assert {out.choice: out.position for out in reversed(harness.outputs)} == {0: 4, 2: 7}
    harness.check_empty()


def test_resumed_choices_without_tokens_fork():
    """Where nothing was emitted, what is left of the choices shares one prefill."""
    harness = Harness()
    request = request_of("a", 20, params=long_running(n=3, temperature=1.0), finished_choices=(0,))
    harness.add(request)

    assert shape_of(next_plan(harness)) == [(0, 0, 20, (1, 2))]
    harness.run()
    harness.check(request)


@pytest.mark.parametrize(
    ("emitted", "finish"), [((1, 2, 7), "stop"), ((1, 2, 3, 4, 5, 6, 8, 9), "length")]
)
def test_a_forced_prefix_that_had_ended_is_closed(emitted, finish):
    """If the last token of an earlier attempt ended it, the end is said without another token."""
    harness = Harness()
    harness.add(request_of("a", 20, emitted=(emitted,)))

    harness.run()

    (output,) = harness.outputs
    assert (output.position, output.token_ids, output.finish) == (len(emitted), (), finish)
    harness.check_empty()


@pytest.mark.parametrize("chunk", [5, 16, 64])
@pytest.mark.parametrize("num_blocks", [4, 64])
def test_prompt_logprobs_are_joined_over_chunks(chunk, num_blocks):
    """One entry per prompt token, None for the first, told once, whatever chunks and preemptions
    there were, and although the prompt is cached."""
    harness = Harness(num_blocks, max_num_batched_tokens=chunk)
    prompt = list(range(30))
    harness.add(request_of("warm", prompt, params=long_running(max_tokens=30)))
    for _ in range(8):
        next_plan(harness)
    params = long_running(prompt_logprobs=2, logprobs=1, max_tokens=30, n=2, temperature=1.0)
    request = request_of("a", prompt, params=params)
    harness.add(request)
    harness.run()

    harness.check(request)
    told = [out.prompt_logprobs for out in harness.outputs if out.prompt_logprobs is not None]
    assert len(told) == 1
    assert told[0][0] is None
    assert [each.token_id for each in told[0] if each is not None] == prompt[1:]
    mine = [out for out in harness.outputs if out.request == "a"]
    assert all(len(out.logprobs or ()) == len(out.token_ids) for out in mine)


def test_prompts_are_not_scored_again_for_nobody():
    """Once its prompt logprobs are told, and for its other choices, no rank computes them."""
    harness = Harness(2)
    params = long_running(prompt_logprobs=1, n=2, temperature=1.0, max_tokens=3)
    harness.add(request_of("a", 20, params=params))

    plans = []
    while harness.core.has_work:
        plans.append(next_plan(harness))

    news = [new for plan in plans for new in plan.new]
    assert [new.params.prompt_logprobs for new in news] == [1, None]


def test_stop_tokens_are_named():
    """The output that ends with a stop id says which; end-of-sequence has none."""
    harness = Harness(max_model_len=200)
    for name, params in (
        ("stop", params_of(stop_token_ids=tuple(range(VOCAB)), ignore_eos=True)),
        ("eos", params_of(max_tokens=None)),
    ):
        harness.add(request_of(name, 10, params=params))
    harness.run()

    last = {out.request: out for out in harness.outputs if out.finish is not None}
    assert last["stop"].stop_token == last["stop"].token_ids[-1]
    assert last["stop"].finish is FinishReason.STOP
    eos = last["eos"]
    assert (eos.finish, eos.stop_token) in {("stop", None), ("length", None)}
    assert (eos.token_ids[-1] in EOS) == (eos.finish == "stop")


def test_contexts_are_bounded_by_the_cache():
    """A request without max_tokens ends when the KV cache is full, not with the engine stuck."""
    harness = Harness(3)
    request = request_of("a", 20, params=params_of(max_tokens=None, ignore_eos=True))
    harness.add(request)
    harness.run()

    assert harness.core.max_model_len == 48
    assert len(harness.tokens("a")) == 28
    harness.check(request)


def test_spent_budgets_end_a_request_anywhere():
    """Waiting or running, a request whose budget is spent fails with the cause and frees all."""
    harness = Harness(4, max_num_seqs=1)
    harness.add(request_of("run", 16, params=long_running(max_tokens=40), budget_ms=1000))
    harness.add(request_of("wait", 16, budget_ms=500))
    harness.add(request_of("free", 16))
    next_plan(harness)

    harness.clock.now += 0.6
    harness.step()
    assert [(each.request, each.cause) for each in harness.failed] == [("wait", FailCause.TIMEOUT)]
    harness.clock.now += 0.6
    harness.run()

    assert [each.request for each in harness.failed] == ["wait", "run"]
    harness.check(request_of("free", 16))
    harness.check_empty()


def test_aborts_free_everything_in_any_state():
    """Waiting, in mid-prompt, running and forked: an abort leaves nothing behind."""
    harness = Harness(20, max_num_batched_tokens=32)
    requests = [
        request_of("done", 8, params=long_running(n=2, temperature=1.0)),
        request_of("chunk", 100),
        request_of("wait", 10),
    ]
    for request in requests:
        harness.add(request)
    next_plan(harness)
    next_plan(harness)

    for request in requests:
        assert harness.core.abort(request.key)
        assert not harness.core.abort(request.key)
        harness.core.check_integrity()
    assert harness.core.scheduler.plan() is None
    assert harness.core.manager.num_free == 20


def test_forks_aborted_before_their_copy_are_forgotten():
    """An abort between fork and copy drops the copy, and the source is free."""
    harness = Harness()
    request = request_of("a", 20, params=long_running(n=4, temperature=1.0))
    harness.add(request)
    next_plan(harness)

    harness.core.abort(request.key)

    harness.core.check_integrity()
    assert harness.core.manager.take_copies() == ()
    assert harness.core.manager.num_free == 64


class Turnstile:
    """A gate that lets a few tokens through each step and opens late for some."""

    def __init__(self, late: str) -> None:
        self.late = late
        self.open = False
        self.left = 0
        self.reserved: list[tuple[str, int]] = []
        self.released: list[str] = []

    def ready(self, request: Request) -> bool:
        """Whether it may pass at all."""
        return self.open or request.request_id != self.late

    def can_reserve(self, request: Request, num_tokens: int) -> bool:
        """Whether so many tokens may pass now."""
        return num_tokens <= self.left

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Take them."""
        self.left -= num_tokens
        self.reserved.append((request.request_id, num_tokens))

    def release(self, request: Request) -> None:
        """It ended."""
        self.released.append(request.request_id)


def test_gates_hold_back_without_blocking():
    """A request whose gate is shut lets others pass; a reservation is made once per step."""
    gate = Turnstile("late")
    harness = Harness(gates=(gate,))
    harness.add(request_of("late", 10, params=params_of(max_tokens=2, ignore_eos=True)))
    harness.add(request_of("fast", 10, params=params_of(max_tokens=2, ignore_eos=True)))

    gate.left = 5
    assert harness.core.scheduler.plan() is None
    gate.left = 11
    next_plan(harness)
    next_plan(harness)
    assert gate.reserved == [("fast", 10), ("fast", 1)]
    gate.open, gate.left = True, 100
    harness.run()

    assert gate.released == ["fast", "late"]
    for request in harness.requests.values():
        harness.check(request)


def test_a_shut_gate_pauses_a_running_request():
    """A decode whose gate is shut is left out of the step, and goes on when it opens."""
    gate = Turnstile("")
    harness = Harness(gates=(gate,))
    harness.add(request_of("a", 10))
    gate.left = 10
    next_plan(harness)

    assert harness.core.scheduler.plan() is None
    gate.left = 100
    harness.run()
    harness.check(request_of("a", 10))


def test_preempted_requests_give_back_what_their_gates_hold():
    """A preemption releases at the gates, and the new start reserves again."""
    gate = Turnstile("")
    gate.left = 10_000
    harness = Harness(4, gates=(gate,))
    for name in "ab":
        harness.add(request_of(name, 16, params=long_running(max_tokens=40)))
    harness.run()

    assert gate.released == ["b", "a", "b"]
    for request in harness.requests.values():
        harness.check(request)


def test_queue_limits_refuse():
    """Requests and tokens that wait are bounded; an empty queue takes any prompt."""
    harness = Harness(max_num_queued_reqs=2)
    assert [harness.add(request_of(name)) for name in "abc"] == [None, None, RefusalCode.CAPACITY]

    harness = Harness(max_num_queued_tokens=50)
    codes = [
        harness.add(request_of(name, size)) for name, size in zip("abc", (60, 1, 1), strict=True)
    ]
    assert codes == [None, RefusalCode.CAPACITY, RefusalCode.CAPACITY]
    harness.run()
    assert harness.add(request_of("c", 40)) is None
    assert harness.add(request_of("d", 10)) is None
