"""Models with sliding windows against transformers, through the whole run half."""

from __future__ import annotations

import random

import pytest
import torch
from tests.engine_run.group_driver import GroupDriver
from tests.engine_run.tiny_models import WINDOW, WINDOWED, folder_of, judged

PROMPTS = (1, 15, WINDOW, 48, 130)
COUNT = 6


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in PROMPTS]


@pytest.mark.parametrize("name", WINDOWED)
def test_tokens_and_logits_equal_transformers(name):
    """Chunks end within and at the borders of blocks and windows, next to decodes."""
    for budget in (23, 64):
        driver = GroupDriver(folder_of(name), num_blocks=72)
        seqs = [driver.add(prompt) for prompt in prompts()]
        tokens = driver.generate(seqs, COUNT, budget=budget)
        for seq, prompt, got in zip(seqs, prompts(), tokens, strict=True):
            want, logits = judged(name, prompt, COUNT)
            assert got == want
            torch.testing.assert_close(driver.logits(seq)[:COUNT], logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("block_size", [32, 64])
def test_blocks_of_any_size_hold_windows(block_size):
    """A window begins within a block, or is a part of one."""
    name, (prompt,) = "qwen3-window", prompts()[-1:]
    driver = GroupDriver(folder_of(name), num_blocks=20, block_size=block_size)
    assert driver.generate([driver.add(prompt)], COUNT, budget=40) == [
        judged(name, prompt, COUNT)[0]
    ]


def test_a_preempted_sequence_computes_its_windows_again():
    name, prompt = "mistral-window", prompts()[-1]
    driver = GroupDriver(folder_of(name))
    seq = driver.add(prompt)
    driver.generate([seq], 3, budget=64)
    assert driver.generate([driver.preempt(seq)], COUNT, budget=31) == [
        judged(name, prompt, COUNT)[0]
    ]
