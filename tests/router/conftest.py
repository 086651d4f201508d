"""What the router's tests share: workers that speak the protocol, and a stack over them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.router.builders import Stack
from tests.router.fake_worker import FakeWorker

from tandem.protocol.card import WorkerRole


@pytest.fixture
def make_worker() -> Iterator[Callable[..., FakeWorker]]:
    """Start fake workers; all are stopped at the end of the test."""
    workers: list[FakeWorker] = []

    def make(role: WorkerRole, **settings: Any) -> FakeWorker:
        worker = FakeWorker(role, **settings)
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.stop()


@pytest.fixture
def prefill(make_worker: Callable[..., FakeWorker]) -> Callable[..., FakeWorker]:
    """Start prefill workers."""
    return lambda **settings: make_worker(WorkerRole.PREFILL, **settings)


@pytest.fixture
def decode(make_worker: Callable[..., FakeWorker]) -> Callable[..., FakeWorker]:
    """Start decode workers."""
    return lambda **settings: make_worker(WorkerRole.DECODE, **settings)


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    """A dispatcher with nothing to dispatch to yet: ``await stack.find(workers)``."""
    made = Stack()
    yield made
    await made.close()
