"""Draws, filters, penalties and scores."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.kernels import BadTensor
from tandem.kernels.bits import GAMMA, mix_int
from tandem.kernels.sampling import (
    Filters,
    Penalties,
    Purpose,
    draw,
    penalize,
    row_keys,
    score_tokens,
    thresholds,
)
from tandem.kernels.sampling.rng import exponentials, uniforms

MASK = (1 << 64) - 1


def keys_for(n, *, seed=7, choice=0, purpose=Purpose.TOKEN):
    """Keys of one sequence's first n positions."""
    return row_keys(torch.full((n,), seed), torch.full((n,), choice), torch.arange(n), purpose)


def one_each(n):
    return torch.arange(n)


def filters(rows, *, min_p=0.0, top_k=0, top_p=1.0):
    return Filters(
        torch.full((rows,), min_p), torch.full((rows,), top_k), torch.full((rows,), top_p)
    )


def kept_by_sorting(row, *, min_p, top_k, top_p):
    """The filters one after another on a fully sorted row, in float64."""
    order = row.double().sort(descending=True)
    values, probs = order.values, order.values.softmax(-1)
    keep = probs >= min_p * probs[0]
    if top_k:
        keep &= torch.arange(len(row)) < top_k
    if top_p < 1:  # 1 keeps all; sums of many reach it before their smallest
        left = values.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= left.cumsum(-1) - left < top_p
    return set(order.indices[keep].tolist())


def test_row_keys_are_the_documented_chain():
    """Keys and bits are those of SplitMix64 on Python integers: pinned across devices."""
    key = mix_int(mix_int(-5 + GAMMA) + 4 * GAMMA)
    key = mix_int(mix_int(key + 10 * GAMMA) + 1 * GAMMA)
    got = row_keys(torch.tensor([-5]), torch.tensor([3]), torch.tensor([9]), Purpose.TOKEN)
    assert int(got.item()) & MASK == key
    bits = mix_int(key + 1000 * GAMMA) >> 32
    uniform = uniforms(got, torch.tensor([999])).item()
    assert uniform == pytest.approx((bits + 0.5) / 2**32, rel=1e-6)


def test_keys_differ_in_every_part():
    """Another seed, choice, position or purpose is another draw."""
    parts = [(s, c, p, u) for s in (0, 1) for c in (0, 1) for p in (0, 1) for u in Purpose]
    keys = {
        row_keys(torch.tensor([s]), torch.tensor([c]), torch.tensor([p]), u).item()
        for s, c, p, u in parts
    }
    assert len(keys) == len(parts)


def test_uniforms_are_uniform():
    """Mean and spread of many, and never 0 or 1."""
    sample = uniforms(keys_for(200)[:, None], torch.arange(1000)[None])
    assert 0 < sample.min() < sample.max() < 1
    assert sample.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert sample.var().item() == pytest.approx(1 / 12, abs=1e-3)
    noise = exponentials(keys_for(200)[:, None], torch.arange(1000)[None])
    assert noise.min() > 0
    assert noise.mean().item() == pytest.approx(1.0, abs=1e-2)


def test_draws_follow_the_distribution():
    """Frequencies of many draws are the probabilities."""
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    counts = draw(
        probs.log()[None], keys_for(20_000), torch.zeros(20_000, dtype=torch.int64)
    ).bincount(minlength=5)
    assert counts[4] == 0
    torch.testing.assert_close(counts / 20_000, probs, atol=0.012, rtol=0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**31))
def test_a_draw_does_not_depend_on_its_batch(rows, seed):
    """Each row alone draws what it draws among others."""
    logits = torch.randn(rows, 300, generator=torch.manual_seed(seed))
    keys = keys_for(rows, seed=seed)
    together = draw(logits, keys, one_each(rows))
    alone = [draw(logits[i : i + 1], keys[i : i + 1], one_each(1)).item() for i in range(rows)]
    assert together.tolist() == alone


def test_a_floor_and_a_temperature_are_what_they_do_to_logits():
    """Drawing under them is drawing from divided and masked logits, and stays above the floor."""
    logits = torch.randn(200, 500)
    keys, temperature = keys_for(200), torch.rand(200) + 0.3
    scaled = logits / temperature[:, None]
    floor = thresholds(logits, filters(200, top_k=50), temperature=temperature)
    assert torch.equal(floor, thresholds(scaled, filters(200, top_k=50)))
    held = draw(logits, keys, one_each(200), temperature=temperature, floor=floor)
    masked = scaled.masked_fill(scaled < floor[:, None], -math.inf)
    assert torch.equal(held, draw(masked, keys, one_each(200)))
    assert (scaled.gather(1, held[:, None]).squeeze(1) >= floor).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([5, 300, 5000]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0, 1, 7, 400, 10_000]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.1, 1.0, 6.0]),
)
@example(seed=1, vocabulary=5000, min_p=0.0, top_k=0, top_p=1.0, spread=6.0)
def test_thresholds_keep_what_sorting_keeps(seed, vocabulary, min_p, top_k, top_p, spread):
    """min-p, then top-k, then top-p, as if the row were sorted and cut three times."""
    row = torch.randn(vocabulary, generator=torch.manual_seed(seed)) * spread
    floor = thresholds(row[None], filters(1, min_p=min_p, top_k=top_k, top_p=top_p))
    got = set((row >= floor).nonzero().view(-1).tolist())
    want = kept_by_sorting(row, min_p=min_p, top_k=min(top_k, vocabulary), top_p=top_p)
    assert len(got ^ want) <= 1  # a sum at the edge may round either way
    assert int(row.argmax()) in got


def test_equals_at_the_boundary_stay_together():
    """Tokens with the boundary's own value are all kept."""
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert thresholds(row, filters(1, top_k=2)).item() == 2.0
    assert thresholds(row, filters(1)).item() == -math.inf


def test_masked_tokens_stay_masked():
    """-inf is neither kept by a nucleus nor drawn."""
    row = torch.full((1, 10), -torch.inf)
    row[0, 3], row[0, 8] = 0.0, -1.0
    floor = thresholds(row, filters(1, top_p=0.9999999, top_k=5))
    for position in range(50):
        keys = row_keys(
            torch.tensor([1]), torch.tensor([0]), torch.tensor([position]), Purpose.TOKEN
        )
        assert draw(row, keys, one_each(1), floor=floor).item() in (3, 8)


def test_penalties_touch_seen_tokens_only():
    """Repetition divides or multiplies; frequency counts; presence needs one emission."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    penalize(
        logits,
        Penalties(
            rows=torch.tensor([0, 0, 0]),
            tokens=torch.tensor([0, 1, 2]),
            counts=torch.tensor([0.0, 2.0, 1.0]),
            repetition=torch.tensor([2.0, 9.0]),
            frequency=torch.tensor([0.5, 9.0]),
            presence=torch.tensor([0.25, 9.0]),
        ),
    )
    assert logits.tolist() == [[1.0, -5.25, -0.25, 0.5], [1.0, 1.0, 1.0, 1.0]]


def test_scores_are_log_probabilities_and_ranks():
    """Logprobs sum to one, ranks count what is better, the best come first."""
    logits = torch.randn(4, 50)
    ids = torch.tensor([0, 7, 7, 49])
    scores = score_tokens(logits, ids, 3)
    reference = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        scores.logprobs.double(), reference[range(4), ids], atol=1e-5, rtol=1e-5
    )
    order = logits.argsort(-1, descending=True)
    assert scores.ranks.tolist() == [order[i].tolist().index(t) + 1 for i, t in enumerate(ids)]
    assert torch.equal(scores.top_ids, order[:, :3])
    assert score_tokens(logits, ids, 0).top_ids.shape == (4, 0)
    assert score_tokens(logits, ids, 60).top_ids.shape == (4, 50)


def test_empty_batches():
    """No rows is a batch like any other."""
    none = torch.empty(0, 9)
    assert draw(none, keys_for(0), one_each(0)).shape == (0,)
    assert thresholds(none, filters(0)).shape == (0,)
    assert score_tokens(none, torch.empty(0, dtype=torch.int64), 2).top_ids.shape == (0, 2)


def test_wrong_types_are_named():
    """Logits must be of a float kind, keys and rows int64."""
    with pytest.raises(BadTensor, match=r"logits is torch\.float64"):
        draw(torch.zeros(1, 4).double(), keys_for(1), one_each(1))
    with pytest.raises(BadTensor, match="keys is"):
        draw(torch.zeros(1, 4), torch.zeros(1), one_each(1))
    with pytest.raises(BadTensor, match="temperature is"):
        draw(torch.zeros(1, 4), keys_for(1), one_each(1), temperature=torch.ones(1).double())
    with pytest.raises(BadTensor, match="top_k has shape"):
        thresholds(torch.zeros(2, 4), filters(2)._replace(top_k=torch.zeros(1)))
