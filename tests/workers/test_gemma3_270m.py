"""Gemma 3 270M in float32: each path gives the tokens of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from gemma3 import IS_INSTALLED, NUM_SHORT, WHY_SKIPPED, WINDOW, gemma_rows, prepared_gemma
from tests.workers.paths import (
    PAIR_CASES,
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
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IS_INSTALLED, reason=WHY_SKIPPED),
]

SOME = (*range(NUM_SHORT), 8, 9, 24)
"""Rows of 17 to 24 tokens, and of 1,004, 1,017 and 1,225."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole() -> Served:
    """The model with all 72 rows."""
    folder = prepared_gemma().path
    return Served(folder, gemma_rows(folder), WINDOW, chunk=256, seconds=300.0)


def some(whole: Served, *picked: int) -> Served:
    return replace(whole, rows=tuple(whole.rows[index] for index in picked))


@pytest.mark.parametrize("half", [0, 1])
def test_64_answers_equal_transformers(whole: Served, half: int) -> None:
    """Each crosses the window twice; half of them are asked for at once."""
    rows = whole.rows[NUM_SHORT:]
    assert len(rows) == 64
    assert min(len(row.prompt) + len(row.tokens) for row in rows) > 2 * WINDOW
    aggregated(replace(whole, rows=rows[half::2]))


@pytest.mark.parametrize("path", [prefix_hits, offloaded, resumed])
def test_tokens_of_one_engine_equal_transformers(
    whole: Served, path: Callable[[Served], None]
) -> None:
    path(some(whole, *SOME))


def test_a_preempted_request_has_the_tokens_of_transformers(whole: Served) -> None:
    """After steps of 128 tokens, windows leave too few blocks for the short answers."""
    preempted(replace(some(whole, *SOME[:9]), chunk=128))


@pytest.mark.parametrize(("path", "connector"), PAIR_CASES)
def test_tokens_of_a_pair_equal_transformers(whole: Served, path: str, connector: str) -> None:
    PAIR_PATHS[path](some(whole, *SOME), connector)
