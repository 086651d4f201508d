"""The embedded model against the reference tokens that transformers made."""

import pytest
from reference import judge, rows
from tests.engine_run.run_driver import Driver

pytestmark = pytest.mark.full


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, pytest.param(64, marks=pytest.mark.nightly)])
def test_smollm2_draws_the_reference_tokens(smollm2, block_size):
    """Prompts of mixed lengths in one batch, in odd chunks, give transformers' greedy tokens."""
    driver = Driver(smollm2, block_size=block_size, num_blocks=4096 // block_size)
    picked = [i for i, row in enumerate(rows()) if len(row.prompt) < 230][::5]
    seqs = [driver.add(rows()[i].prompt) for i in picked]
    got = driver.generate(seqs, 16, budget=101)
    cut = {i: [*tokens, *rows()[i].tokens[16:]] for i, tokens in zip(picked, got, strict=True)}
    wrong, _ = judge(cut)
    assert wrong == []
