"""Gemma 3 270M in float32: each path gives the tokens of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from gemma3 import IS_INSTALLED, WHY_SKIPPED, WINDOW, gemma_rows, prepared_gemma
from tests.workers.paths import (
    PAIR_PATHS,
    Served,
    aggregated,
    offloaded,
    preempted,
    prefix_hits,
    resumed,
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_INSTALLED, reason=WHY_SKIPPED),
]

SOME = (*range(1, 9), 49, 51, 60)
"""Rows of 17 to 28 tokens, and of 518, 597 and 1,131."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole() -> Served:
    """The model with all 64 rows."""
    folder = prepared_gemma().path
    return Served(folder, gemma_rows(folder), WINDOW, chunk=256, seconds=300.0)


def some(whole: Served, *picked: int) -> Served:
    return replace(whole, rows=tuple(whole.rows[index] for index in picked))


def test_64_answers_equal_transformers(whole: Served) -> None:
    assert sum(len(row.prompt) > 2 * WINDOW for row in whole.rows) == 5
    aggregated(whole)


@pytest.mark.parametrize("path", [prefix_hits, offloaded, resumed])
def test_tokens_of_one_engine_equal_transformers(
    whole: Served, path: Callable[[Served], None]
) -> None:
    path(some(whole, *SOME))


def test_a_preempted_request_has_the_tokens_of_transformers(whole: Served) -> None:
    """The window of the row of 518 tokens begins to move while the row is decoded."""
    preempted(some(whole, *SOME[:9]))


@pytest.mark.parametrize("path", PAIR_PATHS)
def test_tokens_of_a_pair_equal_transformers(whole: Served, path: str) -> None:
    PAIR_PATHS[path](some(whole, *SOME), "tcp")
