"""Real stacks for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from stack import Stack

DEADLINE = 150.0
"""Of a request to a stack whose workers are killed."""
STEPS = ["--max-num-batched-tokens", "16", "--max-num-seqs", "16"]
StackMaker = Callable[..., AbstractContextManager[Stack]]


@pytest.fixture
def start_stack(smollm2: Path, tmp_path: Path) -> StackMaker:
    """Start a stack of the embedded model: ``with start_stack(prefill=2) as stack``."""

    def start(**options: Any) -> AbstractContextManager[Stack]:
        return Stack.running(str(smollm2), tmp_path / "stack.log", **options)

    return start


@pytest.fixture
def start_small(small: Path, tmp_path: Path) -> StackMaker:
    """Start a stack of the small model, for tests that are not of SmolLM2 itself."""

    def start(**options: Any) -> AbstractContextManager[Stack]:
        return Stack.running(str(small), tmp_path / "stack.log", reference="small", **options)

    return start


@pytest.fixture(scope="module")
def small_pair(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """``pair``, but of the small model."""
    log = tmp_path_factory.mktemp("small-pair") / "stack.log"
    with Stack.running(str(small), log, reference="small") as stack:
        yield stack


@pytest.fixture(scope="module")
def pair(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker, shared by the tests of a file; none may hurt it, and what
    one has asked is in the caches of the next."""
    log = tmp_path_factory.mktemp("pair") / "stack.log"
    with Stack.running(str(smollm2), log) as stack:
        yield stack


@pytest.fixture(scope="module")
def hurt_stack(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and two decode workers of the small model, for ``hurt``.

    Steps are of 16 tokens, so that a prompt of 2,500 takes a while.
    """
    log = tmp_path_factory.mktemp("hurt") / "stack.log"
    running = Stack.running(
        str(small),
        log,
        reference="small",
        decode=2,
        worker_flags=[*STEPS, "--enable-prompt-embeds"],
        router_flags=["--request-timeout", f"{DEADLINE:g}"],
    )
    with running as stack:
        yield stack


@pytest.fixture
def hurt(hurt_stack: Stack) -> Stack:
    """A stack of which a test may kill workers: it is whole again when the next one begins.

    Each test has a prompt of its own, which is in no cache.
    """
    for name in hurt_stack.killed:
        hurt_stack.restart(name)

    def is_whole() -> bool:
        sample = 'tandem:router_handoff_links{state="up"}'
        return hurt_stack.metrics("router").get(sample) == 2

    hurt_stack.until(is_whole, 60.0, "the stack is not whole again")
    return hurt_stack
