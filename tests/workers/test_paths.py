"""Tiny models with windows or recurrent states: each path gives the tokens of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from reference import Row
from tests.engine_run.tiny_models import WINDOW, folder_of, judged
from tests.workers.paths import ENGINE_PATHS, PAIR_PATHS, Served

FAMILIES = ("gemma3", "mistral-window", "qwen3_5")
LENGTHS = (*range(4, 12), 47, 96, 128, 203)
COUNT = 16


def full(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.full)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of OpenMP wait for each other by spinning, which takes long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def served(family: str) -> Served:
    rows = []
    for length in LENGTHS:
        prompt = [3 + (11 * at + at // 7 + length) % 300 for at in range(length)]
        tokens, logits = judged(family, prompt, COUNT)
        best = logits.topk(2).values
        rows.append(Row(prompt, tokens, (best[:, 0] - best[:, 1]).tolist()))
    return Served(folder_of(family), tuple(rows), WINDOW, chunk=40)


@pytest.mark.parametrize("path", ENGINE_PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_one_engine_equal_transformers(family: str, path: str) -> None:
    ENGINE_PATHS[path](served(family))


@pytest.mark.parametrize(
    "connector", ["tcp", pytest.param("memory_blocks", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("path", ["handoff", pytest.param("unequal", marks=pytest.mark.full)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_a_pair_equal_transformers(family: str, path: str, connector: str) -> None:
    PAIR_PATHS[path](served(family), connector)
