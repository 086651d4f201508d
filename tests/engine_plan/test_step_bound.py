"""Steps of prompts beside decodes that keep within --max-itl-ms on a device that pads them."""

from __future__ import annotations

import random

import pytest
from tests.engine_plan.builders import Harness, request_of
from tests.engine_plan.plans import long_running, next_plan
from tests.engine_plan.test_mixed_steps import harness_of

from tandem.engine.kv_memory import StepSize
from tandem.engine.timing import MISSES, WIDEST, Margin, MeasuredSteps, Padding, StepRoom
from tandem.protocol.messages import DecodeBatch

SIZES = tuple(StepSize(d, n, 8) for n in (64, 128, 256, 512, 768, 1024) for d in (64, 128))
BOUND = 0.021


def padding() -> Padding:
    """Graphs as a rank offers them, the smallest first, those of decodes among them."""
    ordered = sorted(SIZES, key=lambda each: each.decodes + each.chunk_tokens)
    return Padding([StepSize(64, 0, 0), *ordered])


def test_a_step_costs_what_it_is_padded_to() -> None:
    """The smallest graph that holds decodes, tokens and rows; none beyond the largest."""
    graphs = padding()
    assert graphs.tokens(22, 512, 8) == 64 + 512
    assert graphs.tokens(22, 513, 8) == 64 + 768
    assert graphs.tokens(65, 10, 1) == 128 + 64
    assert graphs.tokens(22, 100, 9) is None
    assert graphs.tokens(22, 1025, 1) is None
    assert graphs.weight(22, 512, 1) == 64 + 512 - 22
    assert graphs.weight(22, 1025, 1) == 1025
    assert Padding().weight(22, 513, 20) == 513


def test_a_chunk_ends_where_a_graph_does() -> None:
    """Rather than begin the next one; behind a context, too, and with a prompt in it already."""
    room = StepRoom(padding(), 22, 700, 0.0)
    assert room.most(0, 2048) == 512
    room.take(0, 300)
    assert room.most(0, 2048) == 212
    assert not room.is_full
    room.take(0, 212)
    assert room.is_full
    assert StepRoom(padding(), 22, 700, 4e-5).most(8_000, 2048) == pytest.approx(440, abs=12)


def test_no_step_leaves_the_graphs() -> None:
    """However much time there is, a step is not launched kernel by kernel; nor does it hold more
    prompts than a graph has rows. Where no graph holds the decodes, the time decides alone."""
    room = StepRoom(padding(), 22, 10_000, 0.0)
    assert room.most(0, 2048) == 1024
    for _ in range(8):
        room.take(0, 10)
    assert room.most(0, 2048) == 0
    assert room.is_full
    assert StepRoom(padding(), 129, 1_500, 0.0).most(0, 2048) == 1_500


def test_prompts_wait_for_a_step_with_room() -> None:
    """A full step starts nobody else, whose blocks it would take for nothing."""
    harness = harness_of(4, max_itl_ms=25.0)
    for number in range(6):
        harness.add(request_of(f"p{number}", 60))
    plan = next_plan(harness)
    assert sum(row.num_scheduled_tokens > 1 for row in plan.rows) == 1
    assert len(harness.core.scheduler.request_table.running) == 5


def device(draw: random.Random, decodes: int, context: int, tokens: int) -> float:
    """Seconds of a step, as an H100 takes them: 21.6 us for each token that it is padded to."""
    seconds = 0.0064 + decodes * 8e-6 + context * 5e-8
    if tokens:
        computed = padding().tokens(decodes, tokens, 1) or decodes + tokens
        seconds += 0.0012 + (computed - decodes) * 1.7e-5
    return seconds * draw.gauss(1.0, 0.03)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_bound_is_kept_by_all_but_one_of_a_hundred_steps(seed: int) -> None:
    """On a device whose steps scatter by 3 % and are padded. By medians of times over the tokens of
    prompts alone, four of ten steps were over it."""
    draw, steps, graphs = random.Random(seed), MeasuredSteps(), padding()
    over = wide = 0
    for number in range(6_000):
        decodes = draw.randint(10, 40)
        context = decodes * draw.randint(500, 2_000)
        decode_batch, tokens = DecodeBatch(decodes, context), 0
        if number % 2:
            budget = steps.prompt_tokens_within(decode_batch, BOUND, 4096)
            tokens = StepRoom(graphs, decodes, budget, 0.0).most(0, draw.choice((200, 2048)))
        seconds = device(draw, decodes, context, tokens)
        steps.note(decode_batch, graphs.weight(decodes, tokens, 1) if tokens else 0, seconds)
        if tokens and number > 3_000:
            over += seconds > BOUND
            wide += tokens >= 512
    assert over <= 1_500 * 0.02
    assert wide > 300, "steps are not kept small for nothing"


def test_the_first_steps_of_both_keep_within_the_bound() -> None:
    """A worker that has made decodes alone is given prompts: its steps grow by what was measured.
    By the first one in proportion, which hides behind the reading of weights, the next sixteen
    would be half as long again as the bound."""
    steps, graphs = MeasuredSteps(), padding()
    took: list[float] = []
    wide = 0
    for _ in range(20):
        steps.note(DecodeBatch(12), 0, 0.0064)
    for _ in range(40):
        budget = steps.prompt_tokens_within(DecodeBatch(12), BOUND, 4096)
        tokens = StepRoom(graphs, 12, budget, 0.0).most(0, 2048)
        weight = graphs.weight(12, tokens, 1)
        multiplied = 0.0015 + (12 + weight) * 2.2e-5
        took.append((0.0064**4 + multiplied**4) ** 0.25)
        steps.note(DecodeBatch(12), weight, took[-1])
        wide = max(wide, tokens)
    assert sum(seconds > BOUND for seconds in took) <= 1
    assert max(took) < 1.2 * BOUND
    assert wide > 500, "they do grow"


@pytest.mark.parametrize("held_up", ["one step", "all steps"])
def test_a_width_that_seemed_too_slow_is_tried_again(held_up: str) -> None:
    """Its first step was held up, or everything was four times as slow for fifty steps: the graph
    within reach is the one that seems too slow, and no step would ever show that it is not."""
    steps, graphs, decode_batch = MeasuredSteps(), padding(), DecodeBatch(22, 22_000)
    draw = random.Random(5)
    slow = 4.0 if held_up == "all steps" else 1.0
    for _ in range(40):
        for tokens in (0, 64, 128, 256) if held_up == "one step" else (0, 64, 128, 256, 512):
            weight = graphs.weight(22, tokens, 1) if tokens else 0
            steps.note(decode_batch, weight, device(draw, 22, decode_batch.context, tokens))
    if held_up == "one step":
        steps.note(decode_batch, graphs.weight(22, 512, 1), 0.2)
    sizes: list[int] = []
    for number in range(1_000):
        budget = steps.prompt_tokens_within(decode_batch, BOUND, 4096)
        sizes.append(StepRoom(graphs, 22, budget, 0.0).most(0, 2048))
        seconds = device(draw, 22, decode_batch.context, sizes[-1]) * (slow if number < 50 else 1.0)
        steps.note(decode_batch, graphs.weight(22, sizes[-1], 1), seconds)
    assert min(sizes[:100]) <= 256, "it does seem too slow"
    assert set(sizes[-500:]) == {512}


def test_the_margin_follows_a_quantile() -> None:
    """Whatever the distribution is; and no further than a device that is shared may push it."""
    draw, margin = random.Random(4), Margin()
    over = 0
    for number in range(40_000):
        ratio = 1.0 + draw.expovariate(20.0)
        over += number >= 20_000 and ratio > margin.ratio
        margin.note(ratio)
    assert over / 20_000 == pytest.approx(MISSES, rel=0.2)
    for _ in range(1_000):
        margin.note(9.0)
    assert margin.ratio == WIDEST
    for _ in range(10_000):
        margin.note(0.5)
    assert margin.ratio == 1.0


def test_the_engine_learns_by_what_ranks_pad_to() -> None:
    """Of the executor's capacity: a chunk of the plan ends where a graph does."""
    harness = Harness(
        1000,
        step_sizes=SIZES,
        max_num_batched_tokens=4096,
        max_num_seqs=256,
        max_itl_ms=25.0,
    )
    harness.add(request_of("decode", 4, params=long_running(max_tokens=50)))
    next_plan(harness)
    core = harness.core
    core.scheduler.measured.steepness = 0.0  # of so small a model it is none of a large one's
    for _ in range(20):
        core.scheduler.measured.note(DecodeBatch(1), 0, 0.005)
        core.scheduler.measured.note(DecodeBatch(1), 600, 0.020)
    core.scheduler.measured.refresh()
    load = core.load_report()
    assert load.mixed_chunk_tokens == 512
    ((tokens, seconds),) = load.mixed_steps
    assert tokens == 600
    assert seconds == pytest.approx(0.015)
    harness.add(request_of("prompt", 3000))
    assert max(row.num_scheduled_tokens for row in next_plan(harness).rows) == 512
