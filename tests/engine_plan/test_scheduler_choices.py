"""Choices that fork and resume, prompt scores, and how sequences end."""

import pytest
from prometheus_client import CollectorRegistry
from tests.engine_plan.builders import EOS, VOCAB, Harness, params_of, request_of
from tests.engine_plan.plans import long_running, next_plan, shape_of

from tandem.engine.metrics import EngineMetrics
from tandem.protocol.outputs import FinishReason


def test_choices_fork_after_one_prefill():
    """Three choices cost one prompt; the children share its full blocks and copy the last."""
    harness = Harness()
    request = request_of("a", 20, params=long_running(n=3, temperature=1.0))
    harness.add(request)

    prefill, decode = next_plan(harness), next_plan(harness)

    assert shape_of(prefill) == [(0, 0, 20, (0, 1, 2))]
    assert shape_of(decode) == [(0, 20, 1, (0,)), (1, 20, 1, (1,)), (2, 20, 1, (2,))]
    assert decode.block_copies == ((1, 2), (1, 3))
    assert [new.block_ids for new in decode.new] == [([0, 2],), ([0, 3],)]
    assert [new.token_ids[-1] for new in decode.new] == [
        harness.tokens("a", choice)[0] for choice in (1, 2)
    ]
    harness.run()
    harness.check(request)
    harness.check_empty()


def test_children_without_room_are_computed_again():
    """A fork that finds no free block, or no seat, waits and recomputes its prompt."""
    for harness in (Harness(num_blocks=2), Harness(num_blocks=16, max_num_seqs=2)):
        request = request_of("a", 20, params=long_running(n=3, temperature=1.0, max_tokens=6))
        harness.add(request)

        harness.run()

        harness.check(request)
        harness.check_empty()


def test_a_choice_that_finds_no_seat_was_not_preempted():
    """It waits for its first: nothing was taken from it, and preemptions are others'."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="m", max_model_len=100)
    harness = Harness(num_blocks=16, max_num_seqs=2, metrics=metrics)
    request = request_of("a", 20, params=long_running(n=3, temperature=1.0, max_tokens=6))
    harness.add(request)
    harness.run()
    harness.check(request)
    labels = {"model_name": "m", "engine": "0"}
    for name in ("vllm:num_preemptions_total", "vllm:request_num_preemptions_sum"):
        assert registry.get_sample_value(name, labels) == 0


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


def test_a_resumed_choice_is_not_told_what_another_found():
    """A later choice finds in the cache what the first has computed: nothing of it was cached."""
    harness = Harness(64, max_num_batched_tokens=41, async_scheduling=True)
    request = request_of("a", 40, params=params_of(n=2, ignore_eos=True), emitted=((1,), (2,)))
    harness.add(request)
    harness.run()
    harness.check(request)
    told = [each for each in harness.outputs if each.num_cached_tokens is not None]
    assert [(each.choice, each.num_cached_tokens) for each in told] == [(0, 0), (1, 0)]
