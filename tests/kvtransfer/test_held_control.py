"""A control thread that stood still judges nobody for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key

pytestmark = pytest.mark.full

HELD_SECONDS = 2.5
"""Longer than a peer may be silent."""


class SlowToWake:
    """A poller whose caller, once, gets the interpreter back long after it was told that there is
    nothing to read."""

    def __init__(self, channel: Any) -> None:
        self._real, self._on_tick = channel._poller, channel.on_tick
        self._to_hold = True
        self.ticks: list[float] = []
        self.went_on = threading.Event()
        """The thread has gone on, and judged its peers several times."""
        channel.on_tick = self.on_tick
        channel._poller = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __contains__(self, socket: object) -> bool:
        return socket in self._real

    def poll(self, milliseconds: int) -> Any:
        ready = self._real.poll(milliseconds)
        if self._to_hold and not ready:
            self._to_hold = False
            time.sleep(HELD_SECONDS)
        return ready

    def on_tick(self, now: Any, late: float = 0.0) -> None:
        self._on_tick(now, late)
        self.ticks.append(late)
        if max(self.ticks) > 1.0 and len(self.ticks) > 5:
            self.went_on.set()


@pytest.mark.parametrize("held", ["producer", "consumer"])
def test_a_control_thread_held_for_longer_than_the_timeout_loses_no_peer(workers, held) -> None:
    """The peer spoke all the while; the other end was patient enough."""
    patient = make_config(kv_beat_timeout=60.0)
    p = workers(Producer, make_config() if held == "producer" else patient)
    d = workers(Consumer, make_config() if held == "consumer" else patient)
    d.meet(p)
    slow = SlowToWake((p if held == "producer" else d).service._channel)
    assert slow.went_on.wait(60)

    for end in (p, d):
        role = "producer" if end is p else "consumer"
        assert end.metric("tandem:kv_links_lost_total", role=role) == 0
    key = make_key("after")
    d.open(key, p.incarnation)
    p.hand_over(key, 12, [0, 1, 2], d.incarnation)
    d.load(key, [5, 6, 7])
    d.until(lambda: d.holds(key.request, 12, [5, 6, 7]))
