"""Log-probabilities: of the raw logits, in float32, with equals in a fixed order."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_run.sample_builders import Row, random_logits, sample
from tests.engine_run.sample_oracle import softmax

from tandem.engine.sample import prompt_logprobs
from tandem.engine.sample.logprobs import PART
from tandem.kernels.sampling import score_tokens
from tandem.protocol.sampling import SamplingParams

coarse = st.sampled_from([-math.inf, -3.5, -1.0, -0.0, 0.0, 0.25, 1.0, 2.0])


@settings(max_examples=200, deadline=None)
@given(row=st.lists(coarse, min_size=1, max_size=12), count=st.integers(1, 12))
def test_best_come_first_and_of_equals_the_lowest_id(row: list[float], count: int):
    """The order is by logit, then by id, infinities and both zeros included."""
    count = min(count, len(row))
    best = score_tokens(torch.tensor([row]), torch.tensor([0]), count)
    expected = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    assert best.top_ids[0].tolist() == expected
    if max(row) > -math.inf:
        total = math.log(sum(math.exp(logit) for logit in row))
        wanted = [row[token] - total for token in expected]
        assert best.top_logprobs[0].tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_of_raw_logits(dtype: torch.dtype):
    """Temperature, filters, masks and bias do not show in log-probabilities."""
    logits = random_logits(3, 50).to(dtype)
    asks: list[dict[str, Any]] = [
        {"temperature": 0.3, "seed": 1, "top_k": 3},
        {"temperature": 0, "logit_bias": {7: 100.0}},
        {"temperature": 0, "allowed_token_ids": (9,)},
    ]
    out = sample(logits, [Row(SamplingParams(logprobs=4, **each)) for each in asks])
    assert out.token_ids.tolist()[1:] == [7, 9]
    assert out.logprobs is not None
    for at, got in enumerate(out.logprobs.as_list()):
        row = logits[at].tolist()
        expected = [math.log(share) for share in softmax(row)]
        order = sorted(range(50), key=lambda token: (-row[token], token))
        assert got.token_id == out.token_ids[at]
        assert got.logprob == pytest.approx(expected[got.token_id], abs=1e-4)
        assert got.rank == 1 + sum(x > row[got.token_id] for x in row)
        assert got.top_ids == tuple(order[:4])
        assert got.top_logprobs == pytest.approx([expected[t] for t in order[:4]], abs=1e-4)


def test_only_rows_that_ask_are_scored_and_each_gets_its_count():
    """One row's wish for many does not lengthen another's answer."""
    rows = [
        Row(SamplingParams(temperature=0, logprobs=count), choices=choices)
        for count, choices in [(None, (0,)), (3, (0, 1)), (0, (0,)), (None, (0,)), (90, (5,))]
    ]
    out = sample(random_logits(5, 50), rows)
    assert out.logprobs is not None
    assert {draw: len(each.top_ids) for draw, each in out.logprobs.by_draw().items()} == {
        1: 3,
        2: 3,
        3: 0,
        5: 50,
    }


def test_nobody_asks_nothing_is_scored():
    """Without a request for them there are no log-probabilities."""
    assert sample(random_logits(2, 9), [Row(SamplingParams(temperature=0))] * 2).logprobs is None


def test_prompt_positions_are_scored_in_order():
    """Each position's logits score the token that follows, over more rows than one part."""
    count = 2 * PART + 3
    logits = random_logits(count, 40)
    tokens = [(7 * at) % 40 for at in range(count)]
    scored = prompt_logprobs(logits, tokens, 2)
    assert [each.token_id for each in scored] == tokens
    for at, each in enumerate(scored):
        shares = softmax(logits[at].tolist())
        assert each.logprob == pytest.approx(math.log(shares[tokens[at]]), abs=1e-4)
        assert each.top_ids[0] == int(logits[at].argmax())
        assert len(each.top_ids) == 2
    assert prompt_logprobs(logits[:0], [], 2) == []
    assert prompt_logprobs(logits, tokens, 0)[3].top_ids == ()
