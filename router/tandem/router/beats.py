"""Bounds of the router's heartbeat settings: those that its workers accept.

A worker has no setting for its own: it beats at one pace. It declares a router lost that is silent
for long, and ends all of its requests. A router that beats too seldom, or expects beats faster than
they come, would lose every link again and again.
"""

from __future__ import annotations

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.link import WORKER_BEAT_SECONDS, WORKER_PATIENCE_SECONDS

MAX_INTERVAL = 2.0
"""A beat may be lost, or late, within the workers' patience."""
MIN_TIMEOUT = 2 * WORKER_BEAT_SECONDS


def check_beats(interval: float, timeout: float) -> None:
    """Raise InvalidParameter for settings that contradict the workers', or each other."""
    if interval > MAX_INTERVAL:
        patience = f"a worker takes {WORKER_PATIENCE_SECONDS:g} s of silence for the router's end"
        raise InvalidParameter("beat_interval", interval, f"at most {MAX_INTERVAL:g}: {patience}")
    if timeout < MIN_TIMEOUT:
        pace = f"a worker beats every {WORKER_BEAT_SECONDS:g} s"
        raise InvalidParameter("beat_timeout", timeout, f"at least {MIN_TIMEOUT:g}: {pace}")
    if timeout <= interval:
        raise InvalidParameter("beat_timeout", timeout, f"more than beat_interval, {interval}")
