"""Choice, filters, penalties and scores in Triton against plain torch on a CPU."""

import math

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, GPU, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.sampling import (
    Columns,
    Filters,
    Penalties,
    Purpose,
    best,
    draw,
    gather,
    keep_bits,
    penalize,
    row_keys,
    score_tokens,
    thresholds,
)

pytestmark = NEEDS
VOCAB = size(151_936, 390)
KINDS = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
TRITON = Backend.TRITON


def logits_of(rows, vocab=VOCAB, *, spread=2.0, dtype=torch.float32, seed=0):
    """Logits with a stride, as a head that pads the vocabulary leaves them."""
    wide = torch.randn(rows, vocab + 8, generator=torch.manual_seed(seed)) * spread
    return wide.to(dtype)[:, :vocab]


def keys_of(count, seed=-3):
    many = torch.full((count,), seed)
    return row_keys(many, many * 0 + 1, torch.arange(count), Purpose.TOKEN)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocab", [1, 127, 129, VOCAB])
def test_the_best_token_is_the_first_of_equals(vocab, dtype):
    """As on a CPU, also where maxima are repeated across groups, and for rows of -inf."""
    logits = logits_of(5, vocab, dtype=dtype)
    logits[1] = logits[1].round()
    logits[2, vocab // 2 :] = 9.0
    logits[3] = -math.inf
    assert torch.equal(best(logits.to(DEVICE), backend=TRITON).cpu(), best(logits))
    assert best(logits[:0].to(DEVICE), backend=TRITON).shape == (0,)


@pytest.mark.parametrize(("rows", "draws"), [(0, 0), (1, 1), (5, 9), (130, 300)])
def test_parameters_of_a_step_are_the_columns_at_its_rows(rows, draws):
    """Temperatures and filters of each row and the key of each draw, as plain torch has them."""
    torch.manual_seed(rows)
    columns = Columns(
        seeds=torch.randint(-(2**62), 2**62, (64,)),
        top_k=torch.randint(0, 90, (64,)),
        temperature=torch.rand(64),
        min_p=torch.rand(64),
        top_p=torch.rand(64),
    )
    places = torch.randint(0, 64, (rows,))
    wanted = torch.stack([torch.randint(0, most, (draws,)) for most in (64, 8, 9000)])
    want = gather(columns, places, wanted)
    there = Columns(*(each.to(DEVICE) for each in columns))
    got = gather(there, places.to(DEVICE), wanted.to(DEVICE), backend=TRITON)
    assert torch.equal(got.keys.cpu(), want.keys)
    assert torch.equal(got.temperature.cpu(), want.temperature)
    for a, b in zip(got.filters, want.filters, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocab", [1, 130, VOCAB])
def test_draws_are_those_of_the_cpu(vocab, dtype):
    """Token for token, over temperatures, floors, and draws that share rows."""
    logits = logits_of(3, vocab, dtype=dtype)
    count = size(600, 24 if vocab > 1 else 3)
    keys, rows = keys_of(count), torch.arange(count) % 3
    temperature = torch.tensor([0.7, 1.0, 1.9])
    floor = torch.tensor([-math.inf, 0.3, 1.0]).minimum(logits.float().amax(1) / temperature)
    for heat, least in ((None, None), (temperature, None), (temperature, floor)):
        want = draw(logits, keys, rows, temperature=heat, floor=least)
        got = draw(
            *(each.to(DEVICE) for each in (logits, keys, rows)),
            temperature=None if heat is None else heat.to(DEVICE),
            floor=None if least is None else least.to(DEVICE),
            backend=TRITON,
        ).cpu()
        assert (got != want).sum() <= count // 300  # masses are sums: near ties may turn
        assert vocab == 1 or len(set(got.tolist())) > 10


def test_impossible_tokens_and_broken_rows():
    """-inf is never drawn, and a row of nothing gives a token of the vocabulary."""
    logits = torch.full((2, 400), -math.inf)
    logits[0, 265] = -50.0
    rows = torch.arange(2).repeat(10)
    got = draw(logits.to(DEVICE), keys_of(20).to(DEVICE), rows.to(DEVICE), backend=TRITON)
    assert set(got[rows == 0].tolist()) == {265}
    assert all(0 <= token < 400 for token in got.tolist())


CASES = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": size(5000, 200)},
    {"top_k": 10**7},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"min_p": 0.001, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.95},
    {"min_p": 0.05, "top_k": 40, "top_p": 0.5},
    {},
]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("spread", size([0.05, 1.0, 8.0], [0.05, 8.0]))
def test_thresholds_keep_what_the_reference_keeps(spread, dtype):
    """Every mix of filters in one batch, from flat to peaked rows, with bfloat16's ties."""
    logits = logits_of(len(CASES), spread=spread, dtype=dtype, seed=7)
    logits[3, ::3] = -math.inf
    filters = Filters(
        torch.tensor([case.get("min_p", 0.0) for case in CASES]),
        torch.tensor([case.get("top_k", 0) for case in CASES]),
        torch.tensor([case.get("top_p", 1.0) for case in CASES]),
    )
    temperature = torch.linspace(0.5, 1.5, len(CASES))
    want = thresholds(logits, filters, temperature=temperature)
    got = thresholds(
        logits.to(DEVICE),
        Filters(*(column.to(DEVICE) for column in filters)),
        temperature=temperature.to(DEVICE),
        backend=TRITON,
    ).cpu()
    scaled = logits.float() / temperature[:, None]
    for row, case in enumerate(CASES):
        few = ((scaled[row] >= got[row]) ^ (scaled[row] >= want[row])).sum()
        if "top_p" in case:  # a sum at the edge may round either way, by one value
            between = scaled[row][(scaled[row] >= got[row]) ^ (scaled[row] >= want[row])]
            most = max(1, int(scaled.shape[1] * case["top_p"] * 1e-5))
            assert len(between.unique()) <= most, case
        else:
            assert few == 0, case


def test_few_finite_logits_are_all_kept():
    """top-k above the number of possible tokens keeps them all; nothing hangs on -inf."""
    logits = torch.full((2, VOCAB), -math.inf)
    logits[0, [3, VOCAB - 1]] = torch.tensor([1.0, -2.0])
    filters = Filters(torch.zeros(2), torch.full((2,), 5), torch.full((2,), 0.99999))
    floor = thresholds(
        logits.to(DEVICE), Filters(*(c.to(DEVICE) for c in filters)), backend=TRITON
    ).cpu()
    assert floor[0] <= -2.0
    assert not (logits[1] >= floor[1]).any() or floor[1] == -math.inf


def test_penalties_agree_with_the_reference():
    """All three at once, tokens of the prompt alone included."""
    logits = logits_of(4)
    pairs = 333
    flat = torch.randperm(4 * 200)[:pairs]
    penalties = Penalties(
        flat // 200,
        flat % 200,
        torch.randint(0, 3, (pairs,)).float(),
        torch.tensor([1.0, 1.2, 0.8, 1.5]),
        torch.tensor([0.0, 0.5, -0.4, 0.1]),
        torch.tensor([0.3, 0.0, 0.2, -0.1]),
    )
    want, got = logits.clone(), logits.to(DEVICE)
    penalize(want, penalties)
    penalize(got, Penalties(*(column.to(DEVICE) for column in penalties)), backend=TRITON)
    torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("top", [0, 1, 20])
def test_scores_agree_with_the_reference(top, dtype):
    """Log-probabilities, ranks and the best tokens, equals by id, fewer finite ones than asked."""
    logits = logits_of(6, dtype=dtype)
    logits[1] = (logits[1] * 2).round() / 2
    logits[2] = 0.25
    logits[3, 7:] = -math.inf
    ids = torch.tensor([0, 5, 300, 3, VOCAB - 10, 128])
    want = score_tokens(logits, ids, top)
    got = score_tokens(logits.to(DEVICE), ids.to(DEVICE), top, backend=TRITON)
    assert torch.equal(got.ranks.cpu(), want.ranks)
    assert torch.equal(got.top_ids.cpu(), want.top_ids)
    torch.testing.assert_close(got.logprobs.cpu(), want.logprobs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got.top_logprobs.cpu(), want.top_logprobs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocab", [31, VOCAB])
def test_bits_of_grammars_take_the_rest_away(vocab, dtype):
    """Of some rows, in any order; what the model rules out stays above what is not allowed, and
    words of no row do nothing."""
    logits = logits_of(7, vocab, dtype=dtype)
    logits[2, ::3] = -math.inf
    count = -(-vocab // 32)
    words = torch.randint(-(1 << 31), 1 << 31, (5, count), generator=torch.manual_seed(1)).int()
    some = logits.to(DEVICE, copy=True)
    padded = torch.tensor([5, -1, 0, 2, -1])
    keep_bits(some, words.to(DEVICE), padded.to(DEVICE), backend=TRITON)
    words, rows = words[padded >= 0], padded[padded >= 0]
    found, expected = logits.to(DEVICE, copy=True), logits.clone()
    keep_bits(found, words.to(DEVICE), rows.to(DEVICE), backend=TRITON)
    keep_bits(expected, words, rows)

    assert torch.equal(found.cpu(), expected)
    assert torch.equal(some.cpu(), expected)
    assert torch.equal(expected[1], logits[1])
    allowed = (words[:, 0, None] >> torch.arange(31)) & 1
    assert torch.equal(expected[rows, :31] == -math.inf, allowed == 0)
    keep_bits(found, words[:0].to(DEVICE), rows[:0].to(DEVICE), backend=TRITON)
