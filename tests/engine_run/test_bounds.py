"""What a grammar allows, in the sampler: it outranks other masks, and touches no other row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_run.sample_builders import Row, batch_of, random_logits
from tests.engine_run.sample_oracle import plainly_edited
from tests.engine_run.test_sample_rules import VOCABULARY, ids, sequences

from tandem.engine.sample import Sampler, SamplingBatch
from tandem.engine.sample.bounds import PART
from tandem.engine.sample.edits import edit
from tandem.engine.step import SeqId, TokenMasks
from tandem.kernels.sampling import LOWEST
from tandem.protocol.sampling import SamplingParams


def words_of(allowed: list[int], size: int) -> bytes:
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def bound(batch: SamplingBatch, allowed: dict[int, list[int]], size: int) -> None:
    """Rows of the batch under grammars, as a plan says it."""
    if not allowed:
        return
    masks = TokenMasks(
        1,
        tuple(SeqId(row) for row in allowed),
        bytearray().join(words_of(each, size) for each in allowed.values()),
    )
    batch.mask({seq: int(seq) for seq in masks.seqs}, masks)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(sequences, st.none() | st.lists(ids, min_size=1, max_size=5, unique=True)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_any_mix_with_rules_gives_each_row_its_own(
    rows: list[tuple[Row, list[int] | None]], seed: int
):
    """As the plain rule does it, a token at a time."""
    logits = random_logits(len(rows), VOCABULARY, seed)
    batch = batch_of([row for row, _ in rows])
    bound(batch, {at: g for at, (_, g) in enumerate(rows) if g is not None}, VOCABULARY)
    out = logits.clone()
    edit(out, batch, range(len(rows)), [len(row.output) for row, _ in rows])

    for at, (row, grammar) in enumerate(rows):
        expected = plainly_edited(
            logits[at].tolist(), row.params, row.prompt, row.output, row.eos, grammar
        )
        torch.testing.assert_close(out[at], torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [100, 5_001])
def test_draws_are_allowed_and_neighbours_unchanged(temperature: float, size: int):
    """More rows than a part has, every other one bounded, vocabularies of any size."""
    count = 2 * PART + 6
    params = [
        SamplingParams(temperature=temperature, seed=at, top_p=0.9 if at % 3 else 1.0)
        for at in range(count)
    ]
    rows = [Row(each) for each in params]
    logits = random_logits(count, size).bfloat16()
    allowed = {at: [at % size, (7 * at) % size, size - 1] for at in range(0, count, 2)}
    drawn = []
    for masks in (allowed, {}):
        batch = batch_of(rows)
        if masks:
            bound(batch, masks, size)
        out = Sampler(size).sample(
            logits.clone(), batch, rows=range(count), positions=[0] * count, choices=[(0,)] * count
        )
        drawn.append(out.token_ids.tolist())

    assert all(drawn[0][at] in each for at, each in allowed.items())
    assert drawn[0][1::2] == drawn[1][1::2]


def test_a_step_forgets_the_masks_of_the_one_before():
    """They are of one step; a batch without any has none."""
    batch = batch_of([Row(SamplingParams(temperature=0.0))])
    bound(batch, {0: [3]}, 40)
    assert batch.edits(0, 0)
    batch.mask({}, None)
    assert batch.masks == {}
    assert not batch.edits(0, 0)


def test_what_the_model_rules_out_may_be_all_that_is_allowed():
    """-inf among what is allowed stays above what is not."""
    batch = batch_of([Row(SamplingParams(temperature=0.0))])
    bound(batch, {0: [1, 2]}, 4)
    logits = torch.tensor([[5.0, -math.inf, -math.inf, 4.0]])
    edit(logits, batch, [0], [0])
    expected = torch.tensor([[-math.inf, LOWEST, LOWEST, -math.inf]])
    torch.testing.assert_close(logits, expected)
