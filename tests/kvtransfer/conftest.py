"""A linked producer and consumer, ended with the test."""

import tempfile
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.kvtransfer.agent.agents import Running
from tests.kvtransfer.builders import Consumer, Producer, make_config

from tandem.kvtransfer.control.client import ControlClient
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.waiting import ProgressBoard
from tandem.protocol.ids import new_incarnation


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
def folder():
    """A short name: that of a socket is bounded."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


@pytest.fixture
def node():
    """A folder in which an agent serves; a short name: that of a socket is bounded."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        running = Running(Path(name))
        yield running
        running.stop()


@pytest.fixture
def client():
    """A control client whose thread is the test's."""
    made = ControlClient(
        make_config(),
        new_incarnation(),
        "print",
        board=ProgressBoard(),
        metrics=metrics_of(CollectorRegistry()),
        deliver=lambda item: None,
    )
    yield made
    made.stop()


@pytest.fixture(params=["tcp", "memory_blocks", "shm", "shm_agent"])
def pair(workers, request):
    """A producer and a consumer whose link is up: over slots, and from block to block, in one
    process, as between two, and by an agent between the two."""
    folder = None
    if request.param == "shm_agent":
        folder = str(request.getfixturevalue("node").agent.path.parent)
    config = make_config(kv_connector=request.param, kv_node_folder=folder)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    return producer, consumer


@pytest.fixture
def children():
    """Make children with ``children(connector, port)``; none outlives the test."""
    from tests.kvtransfer.test_processes import Child

    made = []

    def make(*args):
        made.append(Child(*args))
        return made[-1]

    yield make
    for child in made:
        child.end()
