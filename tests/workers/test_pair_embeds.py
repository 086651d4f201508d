"""Prompts of embeddings over a hand-off: tokens as of ids, on either side, again where one must."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.engine_run.embedded import ZERO_SAID, embeds_for, penalized, table_of
from tests.engine_run.tiny_models import folder_of, judge_of, judged
from tests.workers.pair import PROMPT, Pair

from tandem.engine.request import Request
from tandem.engine.scheduler.request_table import RequestTable
from tandem.protocol.requests import Consume

pytestmark = pytest.mark.full

IDS = list(PROMPT)
EMBEDS = embeds_for(folder_of("llama"), IDS)
TAKES = {"enable_prompt_embeds": True}


@pytest.fixture(params=["tcp", "memory_blocks"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A linked pair: KV goes by slots, and from block to block."""
    made = Pair(request.param, engine=TAKES)
    yield made
    made.close()


def test_tokens_are_those_of_ids(pair: Pair) -> None:
    """In chunks, over the link, and again with what both have cached; nothing is held then."""
    said = judged("llama", IDS, 10)[0]
    for name in "ab":
        pair.ask(name, embeds=EMBEDS)
        pair.until(partial(pair.decode.finished, name))
        pair.until(lambda: pair.prefill.free and pair.decode.free)
        assert pair.prefill.tokens(name) == said[:1]
        assert pair.decode.tokens(name) == said
    cached = [each.num_cached_tokens for each in pair.prefill.outputs]
    assert cached == [0, 64]
    assert pair.alone()[0] == said


@pytest.mark.parametrize("known", [1, 6])
def test_a_resumed_request_is_handed_over(pair: Pair, known: int) -> None:
    """Emitted tokens stand behind the vectors, on P and on D."""
    said = judged("llama", IDS, 10)[0]
    pair.ask("a", embeds=EMBEDS, emitted=[said[:known]])
    pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
    assert pair.decode.tokens("a") == said[known:]


def test_choices_share_one_hand_off(pair: Pair) -> None:
    """n first tokens of one prompt of vectors."""
    settings: dict[str, Any] = {"n": 3, "temperature": 0.9, "max_tokens": 6}
    pair.ask("a", embeds=EMBEDS, **settings)
    pair.until(lambda: all(pair.decode.finished("a", n) for n in range(3)) and pair.prefill.free)
    assert [pair.decode.tokens("a", n) for n in range(3)] == pair.alone(**settings)


@pytest.mark.parametrize("known", [0, 2])
def test_a_repetition_penalty_knows_no_placeholder(pair: Pair, known: int) -> None:
    """D computes nothing of the prompt, so no vector reaches its row; id 0, the placeholders', is
    said all the same."""
    folder, rest = folder_of("llama"), dict[str, Any](repetition_penalty=1.8)
    expected = penalized(judge_of("llama"), table_of(folder)[ZERO_SAID], 10, 1.8)
    emitted = [expected[:known]] if known else []
    pair.ask("a", embeds=embeds_for(folder, ZERO_SAID), emitted=emitted, **rest)
    pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
    assert pair.decode.tokens("a") == expected[known:]


def test_a_preempted_one_is_computed_again_by_who_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D has too few blocks for two: it takes vectors of its own, KV of P's is gone by then."""
    preempted, preempt = [], RequestTable.preempt

    def noted(request_table: RequestTable, request: Request) -> None:
        preempted.append(isinstance(request.kv, Consume))
        preempt(request_table, request)

    monkeypatch.setattr(RequestTable, "preempt", noted)
    pair = Pair(engine={**TAKES, "num_gpu_blocks_override": 12, "watermark": 0.0})
    try:
        other = [7, *IDS[1:]]
        prompts = {"a": IDS, "b": other}
        for name, ids in prompts.items():
            pair.ask(name, embeds=embeds_for(folder_of("llama"), ids), max_tokens=60)
        pair.until(lambda: all(pair.decode.finished(name) for name in prompts))
        for name, ids in prompts.items():
            assert pair.decode.tokens(name) == judged("llama", ids, 60)[0]
        assert any(preempted)
    finally:
        pair.close()
