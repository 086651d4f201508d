"""A producer and a consumer whose memory could be mapped, in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kvtransfer.mapped.worker import Worker


@pytest.fixture
def producer(folder: Path) -> Iterator[Worker]:
    made = Worker(folder, 7)
    yield made
    made.transport.stop()


@pytest.fixture
def consumer(folder: Path) -> Iterator[Worker]:
    made = Worker(folder, 0)
    made.transport.receive(made.slots, made.blocks)
    yield made
    made.transport.stop()
