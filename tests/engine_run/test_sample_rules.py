"""Stages that change logits before the choice, each against the plain rule."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.engine_run.sample_builders import Row, batch_of, random_logits, tokens_of
from tests.engine_run.sample_oracle import plainly_edited

from tandem.engine.sample import SamplingBatch, edits
from tandem.engine.sample.edits import edit
from tandem.protocol.sampling import SamplingParams

pytestmark = pytest.mark.full

VOCABULARY = 12
ids = st.integers(0, VOCABULARY - 1)
some_ids = st.lists(ids, max_size=4).map(tuple)
penalty = st.sampled_from([-1.5, -0.25, 0.0, 0.0, 0.5, 2.0])
requests = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=6).map(tuple),
    bad_words_token_ids=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(
        tuple
    ),
    min_tokens=st.integers(0, 4),
    stop_token_ids=some_ids,
    ignore_eos=st.booleans(),
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=3),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 1.3]),
    frequency_penalty=penalty,
    presence_penalty=penalty,
)
sequences = st.builds(
    Row,
    params=requests,
    prompt=st.lists(ids, max_size=6),
    output=st.lists(ids, max_size=6),
    eos=some_ids,
)


def edited(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    return edited_in(batch_of(rows), logits, [len(row.output) for row in rows])


def edited_in(batch: SamplingBatch, logits: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """Rows 0, 1, ... of a batch after every rule."""
    out = logits.clone()
    edit(out, batch, range(len(positions)), positions)
    return out


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(sequences, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_rules_do_what_they_say(rows: list[Row], seed: int):
    """Any mix of rules in any batch gives each row what the plain rule gives it alone."""
    logits = random_logits(len(rows), VOCABULARY, seed)
    got = edited(logits, rows)
    for at, row in enumerate(rows):
        expected = plainly_edited(logits[at].tolist(), row.params, row.prompt, row.output, row.eos)
        assert got[at].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_long_lists_go_to_the_device_once(monkeypatch: pytest.MonkeyPatch):
    """Of a list of nearly all ids, and of a prompt that has as many, no step brings the ids again:
    those that it brings are of the output. Few allowed ids and many mean the same."""
    brought: list[int] = []

    def noted(rows: Any, tokens: Any, device: torch.device) -> Any:
        brought.append(sum(each.numel() for each in tokens))
        return pairs_of(rows, tokens, device)

    pairs_of = edits.pairs_of
    monkeypatch.setattr(edits, "pairs_of", noted)
    vocabulary, barred = 1_000, 432
    params = SamplingParams(
        temperature=0.0,
        allowed_token_ids=tuple(each for each in range(vocabulary) if each != barred),
        repetition_penalty=1.5,
        presence_penalty=0.5,
    )
    few = replace(params, allowed_token_ids=(4, 200, 999))
    prompt, output = list(range(0, vocabulary, 2)), [4, 7, 7]
    rows = [Row(each, prompt=prompt, output=output) for each in (params, few)]
    logits = random_logits(2, vocabulary)
    got = edited(logits, rows)
    assert sum(brought) < 20
    for at, row in enumerate(rows):
        expected = plainly_edited(logits[at].tolist(), row.params, prompt, output, ())
        assert got[at].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert (got[0] == -math.inf).nonzero().tolist() == [[barred]]


@settings(max_examples=100, deadline=None)
@given(row=sequences, said=st.lists(ids, max_size=8), cut=st.integers(0, 8))
def test_growing_row_by_row_is_starting_over(row: Row, said: list[int], cut: int):
    """A row that hears its tokens as they come is the row that a resume would build."""
    row.output = said[:cut]
    grown = batch_of([row])
    for token in said[cut:]:
        grown.extend(0, [token])
    row.output = said
    fresh = batch_of([row])
    logits = random_logits(1, VOCABULARY)
    one, two = (edited_in(batch, logits, [len(said)]) for batch in (grown, fresh))
    assert torch.allclose(one, two, rtol=1e-5, atol=1e-5)


def test_raw_logits_are_left_alone():
    """Nothing writes to the caller's logits, whatever the rows ask for."""
    logits = random_logits(2, VOCABULARY)
    before = logits.clone()
    asks: dict[str, Any] = {
        "logit_bias": {1: 50.0},
        "allowed_token_ids": (1, 2),
        "repetition_penalty": 2.0,
    }
    rows = [
        Row(SamplingParams(seed=1, top_k=2, **asks)),
        Row(SamplingParams(temperature=0, **asks)),
    ]
    tokens_of(logits, rows)
    assert torch.equal(logits, before)


def test_nothing_left_keeps_the_best_allowed():
    """Allowed ids that are all bad words: the best of the allowed is drawn, greedy or not."""
    logits = torch.tensor([[9.0, 1.0, 3.0, 3.0]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature,
            seed=1,
            allowed_token_ids=(1, 2, 3),
            bad_words_token_ids=((1,), (2,), (3,)),
        )
        assert tokens_of(logits, [Row(params)]) == [2]


def test_everything_forbidden_keeps_the_best():
    """Bad words for the whole vocabulary leave the best token."""
    words = tuple((token,) for token in range(4))
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0]])
    assert tokens_of(logits, [Row(SamplingParams(seed=1, bad_words_token_ids=words))]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("allowed", [(140, 299), tuple(range(5, 300))])
def test_allowed_ids_bind_even_where_the_model_says_never(
    allowed: tuple[int, ...], temperature: float
):
    """A token that is not allowed is not drawn even if the model rules out all that are."""
    logits = torch.full((1, 300), -math.inf)
    logits[0, 0] = 5.0
    params = SamplingParams(temperature=temperature, seed=3, allowed_token_ids=allowed)
    assert tokens_of(logits, [Row(params)])[0] in allowed


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_hold_back_ends_until_enough_was_said(ignore_eos: bool):
    """The end of sequence is out of reach at every position below min_tokens, and back after,
    whether it would be an end or not."""
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=ignore_eos)
    drawn = [tokens_of(logits, [Row(params, output=[0] * n, eos=(1,))])[0] for n in range(4)]
    assert drawn == [2, 2, 1, 1]


def test_bad_word_that_began_in_the_prompt_was_not_said():
    """Bad words are looked for in the output alone."""
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    params = SamplingParams(temperature=0, bad_words_token_ids=((0, 1),))
    assert tokens_of(logits, [Row(params, prompt=[0])]) == [1]
    assert tokens_of(logits, [Row(params, prompt=[2], output=[0])]) == [2]


def test_bias_comes_before_penalties():
    """A bias that lifts a logit above 0 makes the repetition penalty divide, not multiply."""
    params = SamplingParams(temperature=0, logit_bias={0: 6.0}, repetition_penalty=2.0)
    got = edited(torch.tensor([[-2.0, 0.0]]), [Row(params, prompt=[0])])
    assert got[0].tolist() == [2.0, 0.0]


def test_bias_cannot_bring_back_what_is_forbidden():
    bias: dict[str, Any] = {"logit_bias": {1: 100.0}}
    others: list[dict[str, Any]] = [
        {"allowed_token_ids": (0, 2)},
        {"bad_words_token_ids": ((1,),)},
    ]
    for asks in others:
        params = SamplingParams(temperature=0, **bias, **asks)
        assert tokens_of(torch.zeros(1, 3), [Row(params)]) == [0]
