"""Into how many chunks a prompt is cut for its link: the model, what is chosen, and for whom."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_plan.builders import Harness, request_of
from tests.engine_plan.handoff import Connector, ProducerSide
from tests.engine_plan.pair import produce

from tandem.engine.config.scheduler import SchedulerConfig
from tandem.engine.kv_memory import StepSize
from tandem.engine.request import Request
from tandem.engine.scheduler.chunks import Chunks
from tandem.engine.scheduler.connector import KVConnector
from tandem.engine.scheduler.connectors import compose
from tandem.engine.scheduler.link_cuts import (
    LEAST_GAIN,
    LEAST_STEPS,
    MOST_CHUNKS,
    LinkCuts,
    equal_chunks,
    finer_chunk,
    foretell,
)
from tandem.engine.scheduler.padding import Padding
from tandem.engine.scheduler.step_times import MeasuredSteps
from tandem.protocol.kv import LinkTimes
from tandem.protocol.steps import Crowd

BLOCK = 16
LINK = LinkTimes(chunk_s=0.0, token_s=0.001)


def even(start: int, count: int) -> float:
    """A millisecond a token, and two for a step."""
    return 0.002 + 0.001 * count


def chosen(count: int, token_s: float, chunk_s: float = 0.0, usual: int = 2048) -> list[int]:
    """Sizes of all chunks of a prompt."""
    before = equal_chunks(count, usual)
    link = LinkTimes(chunk_s, token_s)
    chunk = finer_chunk(before, 0, link, even, block_size=BLOCK, least=64)
    return before if chunk is None else equal_chunks(count, chunk)


@pytest.mark.parametrize(
    ("sizes", "token_s", "end"),
    [
        ([400], 0.001, 0.802),  # all of it behind the end
        ([200, 200], 0.001, 0.604),  # the first half travels while the second is computed
        ([200, 200], 0.002, 1.002),  # and still travels then
        ([100, 300], 0.0001, 0.434),  # the last chunk alone is behind the end
    ],
)
def test_the_last_kv_comes_behind_what_is_computed_and_what_travels(sizes, token_s, end):
    """Chunks are computed one after the other, and travel one after the other."""
    cut = foretell(sizes, 0, LinkTimes(0.0, token_s), even)
    assert cut.end_s == pytest.approx(end)
    assert cut.busy_s == pytest.approx(sum(even(0, each) for each in sizes))


def test_what_is_paid_for_each_chunk_counts():
    """Three milliseconds of messages are paid twice by two chunks that travel one by one."""
    assert foretell([200, 200], 0, LinkTimes(0.003, 0.002), even).end_s == pytest.approx(1.008)


def test_steps_that_seem_quicker_are_no_gain():
    """Where two halves were measured to take less than the whole, the link brings nothing by it."""
    cut = foretell([10, 10], 0, LinkTimes(0.0, 0.0), lambda _, count: 0.001 * count, 0.04)
    assert cut.end_s == cut.busy_s == pytest.approx(0.04)
    quick = LinkTimes(0.0, 1e-6)
    chunk = finer_chunk(
        [512], 0, quick, lambda _, count: count * count / 1e5, block_size=BLOCK, least=64
    )
    assert chunk is None


def test_chunks_look_back_at_those_before_them():
    """Each is asked for with what lies before it."""
    asked = []

    def noted(start: int, count: int) -> float:
        asked.append((start, count))
        return 0.1

    foretell([32, 16], 48, LINK, noted)
    assert asked == [(48, 32), (80, 16)]


@pytest.mark.parametrize("token_s", [0.0, 1e-6, 2e-5])
@pytest.mark.parametrize("count", [512, 2048, 6000])
def test_by_a_fast_link_prompts_are_cut_as_usual(count, token_s):
    """What would be gained is less than what times of steps differ by."""
    assert chosen(count, token_s) == equal_chunks(count, 2048)


@pytest.mark.parametrize("count", [512, 1500, 2048])
def test_a_slow_link_makes_chunks_of_whole_blocks(count):
    """A prompt that was one chunk is several equal ones."""
    sizes = chosen(count, 0.001)
    assert 2 <= len(sizes) <= MOST_CHUNKS
    assert sum(sizes) == count
    assert {size % BLOCK for size in sizes[:-1]} == {0}
    assert len({*sizes[:-1]}) == 1
    assert sizes[-1] <= sizes[0]


def test_the_slower_the_link_the_more_chunks():
    """From as usual on; a link that takes for ever does not take that back."""
    counts = [len(chosen(2048, token_s)) for token_s in (1e-5, 1e-4, 3e-4, 1e-3, 0.1, 10.0)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] > 4


@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("chunk_s", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("count", [130, 512, 1500, 5000])
def test_no_cut_is_worse_by_its_own_model(count, chunk_s, token_s):
    """It brings forward what is more than noise, and no less than it costs the device."""
    link, usual = LinkTimes(chunk_s, token_s), equal_chunks(count, 2048)
    sizes = chosen(count, token_s, chunk_s)
    if sizes == usual:
        return
    before, cut = (foretell(each, 0, link, even) for each in (usual, sizes))
    gain = before.end_s - cut.end_s
    assert gain >= LEAST_GAIN * before.busy_s
    assert gain >= cut.busy_s - before.busy_s


def test_token_1_counts_as_token_2_does():
    """Sixteen chunks would bring KV 8 ms sooner than four, and hold token 1 back by 20 ms."""
    usual, link = [2048], LinkTimes(0.0, 37e-6)

    def step_seconds(_: int, count: int) -> float:
        return 0.0017 + 0.0433 * count / 2048

    assert finer_chunk(usual, 0, link, step_seconds, block_size=64, least=64) == 512
    four, sixteen = (
        foretell(equal_chunks(2048, chunk), 0, link, step_seconds) for chunk in (512, 128)
    )
    assert four.end_s - sixteen.end_s > 0.008
    assert sixteen.busy_s - four.busy_s > 0.02


def test_messages_that_take_long_make_fewer_chunks():
    """Each chunk pays for them."""
    assert len(chosen(2048, 0.001, chunk_s=0.2)) < len(chosen(2048, 0.001))


def cuts(points: list[tuple[int, float]], sizes: list[StepSize] | None = None) -> LinkCuts:
    """Of an engine whose steps of prompt tokens took so long."""
    config = SchedulerConfig(max_num_batched_tokens=2048)
    measured = MeasuredSteps()
    for tokens, seconds in points:
        for _ in range(LEAST_STEPS):
            measured.note(Crowd(0), tokens, seconds)
    return LinkCuts(Chunks(config, BLOCK), measured, Padding(sizes or []), BLOCK)


def test_nothing_measured_is_as_usual():
    """Neither of steps nor of the link."""
    assert cuts([]).chunk(0, 1024, 2048, LINK) is None
    assert cuts([(1024, 1.0)]).chunk(0, 1024, 2048, None) is None
    assert cuts([(1024, 1.0)]).chunk(0, 1024, 2048, LINK) is not None


def test_a_chunk_is_not_far_smaller_than_what_was_measured():
    """A quarter of the smallest step; once that was tried, a quarter of it."""
    assert cuts([(1024, 1.0)]).chunk(0, 1024, 2048, LINK) == 256
    assert (cuts([(256, 0.25), (1024, 1.0)]).chunk(0, 1024, 2048, LINK) or 0) < 256


def test_one_step_that_was_held_up_says_nothing():
    """Else its size would never be tried again, and never be known to be quicker."""
    measured = MeasuredSteps()
    for tokens, seconds in [(1024, 1.0)] * LEAST_STEPS + [(256, 5.0)]:
        measured.note(Crowd(0), tokens, seconds)
    config = SchedulerConfig(max_num_batched_tokens=2048)
    found = LinkCuts(Chunks(config, BLOCK), measured, Padding(), BLOCK)
    assert found.chunk(0, 1024, 2048, LINK) == 256


def test_small_steps_that_take_as_long_are_not_taken():
    """Half of the tokens in the same time would double what the prompt takes."""
    points = [(128, 0.9), (256, 0.9), (512, 0.9), (1024, 1.0)]
    assert cuts(points).chunk(0, 1024, 2048, LinkTimes(0.0, 0.0005)) is None


def test_steps_are_weighed_by_what_they_are_padded_to():
    """Where the smallest graph holds 1,024 tokens, any chunk costs as much."""
    points = [(256, 0.25), (1024, 1.0)]
    graph = StepSize(decodes=0, chunk_tokens=1024, chunks=4)
    link = LinkTimes(0.0, 0.0005)
    assert cuts(points).chunk(0, 1024, 2048, link) is not None
    assert cuts(points, [graph]).chunk(0, 1024, 2048, link) is None


class Timed(ProducerSide):
    """A producer that knows its link."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def link_times(self, request: Request) -> LinkTimes | None:
        """KV takes longer than its prompt."""
        self.asked += 1
        return LinkTimes(0.0, 0.02)


def harness(connector: KVConnector | None, **settings: Any) -> Harness:
    """An engine that was seen to take a millisecond a token, in chunks of 256."""
    fields: dict[str, Any] = {"max_num_batched_tokens": 256, **settings}
    made = Harness(256, connector=connector, max_model_len=2048, block_size=BLOCK, **fields)
    measured = made.core.scheduler.measured
    for tokens in (64, 128, 256) * LEAST_STEPS:
        measured.note(Crowd(0), tokens, 0.001 * tokens)
    return made


def planned(made: Harness) -> list[int]:
    """Tokens of each prompt row of the next plan."""
    plan = made.core.scheduler.plan()
    assert plan is not None
    return [row.num_tokens for row in plan.rows]


def test_a_prompt_that_is_alone_is_cut_for_its_link():
    """By what the connector says, asked once; the chunks are equal."""
    timed = Timed()
    made = harness(timed)
    made.add(produce("a", 256))
    sizes = [planned(made) for _ in range(2)]
    assert sizes[0] == sizes[1]
    assert sizes[0][0] < 256
    assert timed.asked == 1


def test_a_connector_among_others_is_asked():
    """One that knows nothing of links is passed by."""
    made = harness(compose([Connector(), Timed()]))
    made.add(produce("a", 256))
    assert planned(made)[0] < 256


def test_without_a_link_it_is_cut_as_usual():
    """An engine whose connector tells no times."""
    made = harness(ProducerSide())
    made.add(produce("a", 256))
    assert planned(made) == [256]


def test_prompts_that_others_wait_behind_are_cut_as_usual():
    """Finer chunks cost the device time, which those would lose."""
    made = harness(Timed())
    made.add(produce("a", 256))
    made.add(produce("b", 256))
    assert planned(made) == [256]


def test_a_prompt_is_cut_as_usual_while_another_is_computed():
    """Nobody waits in the queue any more, but both want the device."""
    made = harness(Timed(), max_num_batched_tokens=512, long_prefill_token_threshold=256)
    made.add(produce("a", 1000))
    assert planned(made)[0] < 256
    made.add(produce("b", 600))
    assert planned(made) == [256, 256]
    assert planned(made) == [256, 256]


def test_beside_decodes_no_prompt_is_cut_for_its_link():
    """What such a step takes is not what steps of prompts alone do."""
    made = harness(Timed(), max_num_mixed_tokens=256)
    made.add(request_of("d", 20))
    planned(made)
    made.add(produce("a", 256))
    assert planned(made) == [1, 255]
