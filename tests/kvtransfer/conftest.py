"""A linked producer and consumer, ended with the test."""

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config


@pytest.fixture
def workers():
    """Make workers with ``workers(Producer, config)``; all are closed at the end."""
    made = []

    def make(kind, *args, **more):
        worker = kind(*args, **more)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.service.close()


@pytest.fixture(params=["tcp", "memory_blocks", "shm"])
def pair(workers, request):
    """A producer and a consumer whose link is up: over slots, and from block to block, in one
    process and as between two."""
    config = make_config(kv_connector=request.param)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    return producer, consumer
