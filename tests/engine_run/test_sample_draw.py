"""The draw: the right distribution, from the right noise, for the right draw only."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_run.sample_builders import Row, random_logits, sample, tokens_of
from tests.engine_run.sample_oracle import chi_square_limit, distribution, noise, race, softmax

from tandem.kernels.sampling import GROUP, GROUP_NOISE, Purpose, best, draw, row_keys
from tandem.kernels.sampling.rng import exponentials
from tandem.protocol.sampling import SamplingParams

int64 = st.integers(-(2**63), 2**63 - 1)
EDGES = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**32, 2**63 - 1]


def keys_of(seed: int, choice: int, positions: range) -> torch.Tensor:
    """Keys of one choice at many positions."""
    count = len(positions)
    seeds, choices = torch.full((count,), seed), torch.full((count,), choice)
    return row_keys(seeds, choices, torch.tensor(positions), Purpose.TOKEN)


@settings(max_examples=100, deadline=None)
@given(seed=int64, choice=st.integers(0, 127), position=st.integers(0, 2**31), token=st.integers(0))
def test_noise_is_a_function_of_what_the_draw_is_for(seed, choice, position, token):
    """Noise has the bits that its definition gives, over all seeds, also negative ones."""
    index = token % (GROUP_NOISE + 2000)
    keys = keys_of(seed, choice, range(position, position + 1))
    got = exponentials(keys, torch.tensor([index])).item()
    want = noise(seed, choice, position, index)
    # The uniform is float32, so its distance from 1, e^-want, is known to 2^-25.
    assert got == pytest.approx(want, rel=max(1e-5, 2**-24 * math.exp(want)))


@pytest.mark.parametrize("seed", EDGES)
@pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 129, 1000])
def test_draws_are_those_of_the_plain_race(seed: int, vocabulary: int):
    """Token for token what the definition says, whether or not groups are full."""
    logits = random_logits(1, vocabulary, seed=7)
    probabilities = softmax(logits[0].tolist())
    got = draw(logits, keys_of(seed, 2, range(20)), torch.zeros(20, dtype=torch.int64))
    assert got.tolist() == [race(probabilities, seed, 2, position) for position in range(20)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.3, min_p=0.01, top_k=60, top_p=0.9),
    ],
    ids=["plain", "cold", "hot", "top-k", "top-p", "min-p", "all"],
)
@pytest.mark.parametrize("seed", [0, -5])
def test_draws_have_the_right_distribution(params: SamplingParams, seed: int):
    """Over 20,000 positions the counts fit the probabilities of the filtered softmax."""
    vocabulary, count = 400, 20_000
    logits = random_logits(1, vocabulary, seed=3) / 2
    expected = distribution(logits[0].tolist(), params)
    drawn = counts_of(logits, params, seed, count)
    assert all(drawn[token] == 0 for token in range(vocabulary) if expected[token] == 0.0)
    likely = [token for token in range(vocabulary) if expected[token] * count >= 10]
    rest = (count - sum(drawn[t] for t in likely), count * (1 - sum(expected[t] for t in likely)))
    cells = [(drawn[token], expected[token] * count) for token in likely]
    cells += [rest] if rest[1] >= 10 else []
    statistic = sum((got - wanted) ** 2 / wanted for got, wanted in cells)
    assert len(cells) > 3
    assert statistic < chi_square_limit(len(cells) - 1)


def counts_of(logits: torch.Tensor, params: SamplingParams, seed: int, count: int) -> list[int]:
    """How often each token is drawn at positions 0 to ``count``, by the draw after the filters."""
    scaled = logits[0] / params.temperature
    kept = torch.tensor([p > 0 for p in distribution(logits[0].tolist(), params)])
    row = torch.where(kept, scaled, -math.inf).unsqueeze(0)
    drawn = draw(row, keys_of(seed, 0, range(count)), torch.zeros(count, dtype=torch.int64))
    return torch.bincount(drawn, minlength=logits.shape[1]).tolist()


def test_choices_positions_and_seeds_are_independent():
    """Pairs of draws that differ in one of them agree as often as chance has it."""
    logits = torch.zeros(1, 200)
    row, count = torch.zeros(20_000, dtype=torch.int64), 20_000
    first = draw(logits, keys_of(1, 0, range(count)), row)
    others = {
        "choice": keys_of(1, 1, range(count)),
        "position": keys_of(1, 0, range(1, count + 1)),
        "seed": keys_of(2, 0, range(count)),
        "purpose": row_keys(torch.full((count,), 1), row, torch.arange(count), Purpose.ACCEPT),
    }
    for name, keys in others.items():
        agree = int((draw(logits, keys, row) == first).sum())
        assert 50 < agree < 150, name


def test_draws_survive_small_numeric_differences():
    """Noise of 1e-4 on every logit changes less than one draw in a thousand."""
    logits = random_logits(1, 5000)
    shaken = logits + 1e-4 * random_logits(1, 5000, seed=1)
    keys, row = keys_of(4, 0, range(4000)), torch.zeros(4000, dtype=torch.int64)
    changed = (draw(logits, keys, row) != draw(shaken, keys, row)).sum()
    assert int(changed) < 4


def test_impossible_tokens_are_never_drawn():
    """-inf stays out, even where a whole group is -inf and but one token is left."""
    logits = torch.full((1, 3 * GROUP + 5), -math.inf)
    logits[0, 2 * GROUP + 9] = -50.0
    keys = keys_of(0, 0, range(500))
    drawn = draw(logits, keys, torch.zeros(500, dtype=torch.int64))
    assert set(drawn.tolist()) == {2 * GROUP + 9}


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_row_without_any_number_gives_some_token(value: float):
    """A broken row neither crashes the step nor leaves the vocabulary."""
    logits = torch.full((1, 300), value)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=3, top_p=0.5, min_p=0.1),
    ):
        assert 0 <= tokens_of(logits, [Row(params)])[0] < 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype):
    """Ties go to the lowest id, also for top-k 1 at any temperature."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [5.0, 5.0, 5.0, 5.0]], dtype=dtype)
    assert best(logits).tolist() == [1, 0]
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1, temperature=1.5)):
        assert tokens_of(logits, [Row(params)] * 2) == [1, 0]


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=2, seed=0), SamplingParams(top_p=0.4, seed=0)]
)
def test_equals_at_a_filters_edge_stay_together(params: SamplingParams):
    """A filter never cuts between equal logits: which would stay would be chance."""
    logits = torch.tensor([[2.0, 2.0, 2.0, -9.0]])
    drawn = {int(sample(logits, [Row(params, output=[0] * n)]).token_ids[0]) for n in range(40)}
    assert drawn == {0, 1, 2}


@pytest.mark.full
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 50),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    top_k=st.sampled_from([-1, 0, 1, 3, 40, 10_000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
)
def test_a_request_draws_what_the_plain_rules_draw(seed, temperature, min_p, top_k, top_p):
    """From logits to token, the pipeline and the plain definition agree."""
    logits = random_logits(1, 300, seed)
    seed = 2 * seed - 50  # of either sign, but never -1, which is none
    params = SamplingParams(
        temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p, seed=seed
    )
    expected = distribution(logits[0].tolist(), params)
    for position in range(3):
        (got,) = tokens_of(logits, [Row(params, output=[0] * position, choices=(4,))])
        assert got == race(expected, seed, 4, position)
