"""Real stacks for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from stack import Stack

StackMaker = Callable[..., AbstractContextManager[Stack]]


@pytest.fixture
def start_stack(smollm2: Path, tmp_path: Path) -> StackMaker:
    """Start a stack of the embedded model: ``with start_stack(prefill=2) as stack``."""

    def start(**options: Any) -> AbstractContextManager[Stack]:
        return Stack.running(str(smollm2), tmp_path / "stack.log", **options)

    return start


@pytest.fixture(scope="module")
def pair(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker, shared by a module's tests; none may hurt it."""
    log = tmp_path_factory.mktemp("pair") / "stack.log"
    with Stack.running(str(smollm2), log) as stack:
        yield stack
