"""Threads of a worker share its interpreter: none is kept from it for long by the step loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.link.naps import SWITCH_SECONDS
from tandem.protocol.card import WorkerRole
from tandem.worker import launch


class NoFurther(Exception):
    """The worker has begun."""


@pytest.fixture
def interval() -> Iterator[float]:
    """This process's own, which it gets back."""
    own = sys.getswitchinterval()
    yield own
    sys.setswitchinterval(own)


def test_a_worker_lets_threads_switch_soon(
    interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of it runs; Python's own interval is ten times as long."""

    def no_further(*_: object) -> None:
        raise NoFurther

    monkeypatch.setattr(launch, "WorkerProbes", no_further)
    nothing: Any = None
    with pytest.raises(NoFurther):
        launch.run_worker(nothing, nothing, WorkerRole.DECODE, executor=nothing, make_role=nothing)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert interval > SWITCH_SECONDS
