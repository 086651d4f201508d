"""What tests of several rooms share: the embedded model, and which tests may run beside which."""

import signal
from pathlib import Path

import pytest

from tandem.hub import DEFAULT_MODEL, prepare

ALONE = {"e2e": "stacks of processes", "operator": "API server", "chaos": "as e2e", "screens": "ui"}
"""Rooms of tests whose files share something of the machine: all run in one process. They take the
longest, in this order, and begin first: what is short fills up the end."""


def pytest_configure() -> None:
    """A background job of a shell ignores SIGINT, and so would every process that tests start: they
    would never end at the Ctrl-C that a test sends."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With two processes a file's tests stay together, so that its fixtures are made once."""
    for item in items:
        room = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(ALONE.get(room, str(item.path))))
    if hasattr(config, "workerinput"):  # one of several processes
        first = list(ALONE)
        items.sort(key=lambda item: (*first, item.path.parent.name).index(item.path.parent.name))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The prepared folder of the embedded default: SmolLM2-135M-Instruct, weights in float32."""
    return prepare(DEFAULT_MODEL, progress=False).path
