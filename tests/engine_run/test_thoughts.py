"""Budgets of thinking: the mark comes when they are spent, whatever the model would draw."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_run.cpu_engine import CPUEngine
from tests.engine_run.drafting import Guesses, guess
from tests.engine_run.sample_builders import Row, random_logits, tokens_of
from tests.engine_run.test_drafts import DRAFTS, engine, told_by
from tests.engine_run.thinkers import thinker_of
from tests.engine_run.tiny_models import folder_of

from tandem.engine.sample.rules import OPENS_WITHIN, ThinkingBudget
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams, ThinkingMarks
from tandem.protocol.structured import ReasoningSpan, StructuredOutputsParams
from tandem.text.tokenizer import Tokenizer

pytestmark = pytest.mark.full

CLOSE, OPENS = 9, ((3, 4), (5,))
BEGUN = ThinkingMarks(close=CLOSE, has_begun=True)
UNBEGUN = ThinkingMarks(opens=OPENS, close=CLOSE)
PROMPTS = [[(11 * each + 7 * at) % 300 + 5 for at in range(25 + 9 * each)] for each in range(4)]


def params(budget: int, marks: ThinkingMarks = BEGUN, **more: object) -> SamplingParams:
    return SamplingParams(seed=7, thinking_token_budget=budget, thinking=marks, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("marks", "output", "ends"),
    [
        (BEGUN, [1, 1, 1], True),
        (BEGUN, [1, 1], False),
        (BEGUN, [1, CLOSE, 1, 1, 1], False),
        (UNBEGUN, [1, 1, 1, 1, 1], False),
        (UNBEGUN, [3, 4, 1, 1, 1], True),
        (UNBEGUN, [2, 5, 1, 1, 1], True),
        (UNBEGUN, [5, 1, 1], False),
        (UNBEGUN, [3, 1, 4, 1, 1, 1], False),
        (UNBEGUN, [*([1] * OPENS_WITHIN), 5, 1, 1, 1], False),
    ],
)
def test_a_thought_ends_when_its_tokens_are_spent(
    marks: ThinkingMarks, output: list[int], ends: bool
) -> None:
    """A budget of three; and not before, and not again."""
    logits = random_logits(1, 12)
    logits[0, CLOSE] = -50.0
    for more in ({}, {"temperature": 0.0}, {"bad_words_token_ids": ((CLOSE,),)}):
        row = Row(params(3, marks, **more), prompt=[1, CLOSE], output=output)
        assert (tokens_of(logits, [row]) == [CLOSE]) is ends


def test_no_budget_and_any_budget_change_nothing() -> None:
    logits = random_logits(1, 12)
    free = tokens_of(logits, [Row(SamplingParams(seed=7), output=[1] * 9)])
    assert tokens_of(logits, [Row(params(-1), output=[1] * 9)]) == free
    assert tokens_of(logits, [Row(params(10), output=[1] * 9)]) == free


@given(output=st.lists(st.integers(0, 9), max_size=24), budget=st.integers(0, 20), cut=st.data())
def test_a_thought_told_in_parts_is_that_told_at_once(
    output: list[int], budget: int, cut: st.DataObject
) -> None:
    """And it never has to end before tokens are known that it says are not needed."""
    for marks in (BEGUN, UNBEGUN):
        at = cut.draw(st.integers(0, len(output)))
        parts = ThinkingBudget(marks, budget, output[:at]).copy()
        ahead = [parts.copy() for _ in range(2)]
        unseen = parts.may_end_unseen
        parts.extend(output[at:])
        whole = ThinkingBudget(marks, budget, output)
        assert (parts.is_over, parts.forced is None) == (whole.is_over, whole.forced is None)
        for count, each in enumerate(ahead, 1):
            each.extend(output[at : at + count])
            assert unseen or each.forced is None


def close_at(tokens: list[int]) -> int:
    return tokens.index(CLOSE)


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_steps_in_flight_the_mark_is_where_it_belongs(budget: int, temperature: float) -> None:
    """Rows that think stand among rows that do not, whose tokens stay as they were."""
    alone = CPUEngine(folder_of("llama"), num_gpu_blocks_override=40)
    free = SamplingParams(temperature=temperature, seed=7)
    wanted = alone.generate(PROMPTS, 12, free)
    mixed = CPUEngine(folder_of("llama"), num_gpu_blocks_override=40)
    barred = params(budget, temperature=temperature, logit_bias={CLOSE: -100.0})
    keys = [mixed.add(prompt, 12, barred if at % 2 else free) for at, prompt in enumerate(PROMPTS)]
    made = mixed.run()
    for at, (key, expected) in enumerate(zip(keys, wanted, strict=True)):
        tokens = made[key.request]
        if at % 2:
            assert close_at(tokens) == budget
            assert tokens[:budget] == expected[:budget] or temperature
        else:
            assert tokens == expected


def test_drafts_do_not_go_past_a_budget() -> None:
    """Tokens that are proposed behind the mark are not taken."""
    spoken = engine()
    key = spoken.add(PROMPTS[0], 12, params(5, temperature=0.0, logit_bias={CLOSE: -100.0}))
    plain = spoken.run()[key.request]
    drafted = engine(speculative_config=DRAFTS, async_scheduling=True)
    drafted.add(PROMPTS[0], 12, params(5, temperature=0.0, logit_bias={CLOSE: -100.0}))
    guess(drafted, Guesses([(PROMPTS[0], plain)], wrong_every=9))
    tokens, _, accepted = told_by(drafted)
    assert tokens == {key.request: plain}
    assert accepted > 0
    assert close_at(plain) == 5


def test_what_is_no_budget_is_named() -> None:
    with pytest.raises(InvalidParameter, match="thinking_token_budget: -2 is not allowed"):
        params(-2).verify()
    marks = msgspec.structs.replace(BEGUN, close=99)
    with pytest.raises(InvalidParameter, match="thinking_token_budget: 99 is not allowed"):
        params(1, marks).verify_vocabulary(50)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "temperature"), [(0, 1.0), pytest.param(6, 0.0, marks=pytest.mark.nightly), (6, 1.0)]
)
def test_a_form_begins_behind_a_thought_that_its_budget_ends(
    smollm2: Path, tmp_path: Path, budget: int, temperature: float
) -> None:
    """The thought is as without a form, the mark comes in its place, and all that follows it is of
    the form: draws know both bounds in every step."""
    folder = thinker_of(smollm2, tmp_path / "model")
    tokenizer = Tokenizer.load(folder)
    (close,) = tokenizer.encode("</think>", add_special_tokens=False)
    marks = ThinkingMarks(close=close, has_begun=True)
    prompt = tokenizer.encode("The sea is", add_special_tokens=False)
    form = StructuredOutputsParams(
        regex="(deep|shallow), [0-9]{2} m", reasoning=ReasoningSpan(close="</think>")
    )
    bounds = {"seed": 7, "temperature": temperature, "thinking_token_budget": budget}
    spoken = CPUEngine(folder, num_gpu_blocks_override=40, max_model_len=256)
    try:
        plain = SamplingParams(**bounds, thinking=marks)  # type: ignore[arg-type]
        (free,) = spoken.generate([prompt], budget + 1, plain)
        formed = msgspec.structs.replace(plain, structured_outputs=form)
        (tokens,) = spoken.generate([prompt], 40, formed)
    finally:
        spoken.core.close()
    assert tokens[budget] == free[budget] == close
    assert temperature or tokens[:budget] == free[:budget]
    assert close not in tokens[:budget]
    text = tokenizer.decode(tokens[budget + 1 :])
    assert re.fullmatch(r"\s{0,8}(deep|shallow), [0-9]{2} m", text), text
