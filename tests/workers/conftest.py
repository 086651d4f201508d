"""A whole worker in a thread, and a router that has greeted it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.workers.hand_router import Router
from tests.workers.proc_worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker that is ended whatever happened."""
    made = Worker()
    yield made
    if made.thread.is_alive():
        made.end()
    made.probes.close()


@pytest.fixture
def router(worker: Worker) -> Iterator[Router]:
    made = Router(worker.proc.endpoint)
    made.greet()
    yield made
    made.socket.close()
