"""Tiny models with windows or recurrent states: each path gives the tokens of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from make_reference import greedy
from reference import Row
from tests.engine_run.forked_rank import ForkedExecutor
from tests.engine_run.test_drafts import DRAFTS
from tests.engine_run.tiny_models import WINDOW, folder_of, judge_of
from tests.forked import fork_server
from tests.workers.paths import (
    ENGINE_PATHS,
    PAIR_CASES,
    PAIR_PATHS,
    Served,
    drafted,
    preempted,
)

from tandem.engine.request import Request
from tandem.engine.scheduler.updater import Updater
from tandem.engine.step import DraftSampled

FAMILIES = ("gemma3", "mistral-window", "qwen3_5", "deepseek-v3", "gpt-oss")
STATELESS = tuple(each for each in FAMILIES if each != "qwen3_5")
"""Families that ranks cut, and that take drafts."""
LENGTHS = (*range(4, 12), 47, 96, 128, 203)
COUNT = 16
DIRECT = (("handoff", "memory_blocks"), ("unequal", "memory_blocks"))
"""Cases of a transport that writes the blocks of D."""


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
        rows.append(Row(prompt, *greedy(judge_of(family), prompt, COUNT)))
    return Served(folder_of(family), tuple(rows), WINDOW, chunk=40)


@pytest.mark.parametrize("path", ENGINE_PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_one_engine_equal_transformers(family: str, path: str) -> None:
    ENGINE_PATHS[path](served(family))


@pytest.mark.full
@pytest.mark.parametrize("family", STATELESS)
def test_two_ranks_preempt_and_equal_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fork_server("rank")
    executor = ForkedExecutor()
    try:
        preempted(served(family), executor=executor, tensor_parallel_size=2)
    finally:
        executor.stop()


@pytest.mark.parametrize(
    ("path", "connector"),
    [
        PAIR_CASES[0],
        *(pytest.param(*each, marks=pytest.mark.full) for each in (*PAIR_CASES[1:], *DIRECT)),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_a_pair_equal_transformers(family: str, path: str, connector: str) -> None:
    PAIR_PATHS[path](served(family), connector)


@pytest.mark.full
@pytest.mark.parametrize("family", STATELESS)
def test_drafts_at_d_change_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    settle = Updater._settle_drafts

    def noted(updater: Updater, request: Request, result: DraftSampled) -> None:
        checked.append(result.num_drafts)
        settle(updater, request, result)

    monkeypatch.setattr(Updater, "_settle_drafts", noted)
    drafted(served(family), "shm", DRAFTS)
    assert sum(checked) > 0
