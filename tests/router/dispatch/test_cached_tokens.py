"""Prompt tokens that were cached: told once, whoever tells of them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.router.behaviours import ANSWER, Make, die, has_read, ledgers
from tests.router.builders import BUSY, Stack, beats, make_request, tokens_of
from tests.router.fake_worker import Turn

from tandem.tracing.recording import Recording, begin


async def test_a_cached_prompt_counts_once(stack: Stack, decode: Make) -> None:
    """However many choices, and attempts at them, tell of it."""

    def dies(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.token(0)
        turn.token(1)
        yield from die(turn, has_read(stack, 2))

    first, second = decode(num_cached=16, behaviour=dies), decode(num_cached=32)
    await stack.find(first, second)
    second.load = BUSY
    await beats(stack, second)
    recording = Recording("r", 0.0)
    begin(recording)

    outputs = await stack.run(make_request())
    assert tokens_of(outputs) == ANSWER
    assert len(second.submitted) == 1
    assert [each.num_cached_tokens for each in outputs] == [16] + [None] * 7
    assert stack.metric("vllm:prompt_tokens_cached_total", model_name="fake") == 16
    await stack.run(make_request(n=3))
    assert stack.metric("vllm:prompt_tokens_cached_total", model_name="fake") == 48
    assert recording.num_cached == 48


async def test_a_cached_prompt_counts_though_its_prefill_worker_is_read_behind_the_other(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """P's word is new in nothing else, and D's share came over the link."""

    def second(turn: Turn) -> Iterator[float]:
        turn.accept()
        while not any(each.num_tokens for each in ledgers(stack)):
            yield 0.001
        turn.token(0)

    def first(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.token(0)
        while not any(each.num_repeated for each in ledgers(stack)):
            yield 0.001
        for position in range(1, 8):
            turn.token(position)

    await stack.find(
        prefill(num_cached=32, behaviour=second), decode(num_cached=8, behaviour=first)
    )
    outputs = await stack.run(make_request())
    assert tokens_of(outputs) == ANSWER
    assert [each.num_cached_tokens for each in outputs] == [None, 32] + [None] * 6
    assert stack.metric("vllm:prompt_tokens_cached_total", model_name="fake") == 32
