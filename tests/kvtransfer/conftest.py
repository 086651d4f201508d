"""A linked producer and consumer, ended with the test."""

import pytest
from tests.kvtransfer.builders import Consumer, Producer


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


@pytest.fixture
def pair(workers):
    """A producer and a consumer over tcp whose link is up."""
    producer, consumer = workers(Producer), workers(Consumer)
    consumer.meet(producer)
    return producer, consumer
