"""Shutdown of a local stack: the router first, so that streams can end, then the workers.

Each process gets as long as it may drain. The terminal shows what is waited for. A second signal
ends everything at once.
"""

from __future__ import annotations

import signal
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException

from tandem.cli.children import Child
from tandem.cli.loopback import DIRECT

POLL_SECONDS = 0.1
SAY_SECONDS = 5.0
MARGIN_SECONDS = 8.0
"""Time in addition to its drain in which a process may close its connections and files."""
_COUNTED = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")


@dataclass(frozen=True, slots=True)
class Graces:
    """Seconds for running requests, by draining process."""

    router: float
    workers: float


def stop(
    children: list[Child],
    graces: Graces,
    *,
    hurried: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """End the processes; none runs afterwards. ``hurried`` ends every wait early."""
    routers = [child for child in children if child.arguments[0] == "router"]
    workers = [child for child in children if child not in routers]
    try:
        for group, grace in ((routers, graces.router), (workers, graces.workers)):
            for child in group:
                child.signal(signal.SIGTERM)
            _wait(group, workers, grace + MARGIN_SECONDS, hurried=hurried, say=say)
    finally:
        for child in children:
            child.kill()


def _wait(
    group: list[Child],
    workers: list[Child],
    seconds: float,
    *,
    hurried: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    started = said = time.monotonic()
    while any(child.is_running for child in group) and not hurried():
        now = time.monotonic()
        if now - started > seconds:
            names = ", ".join(child.name for child in group if child.is_running)
            say(f"{names} did not end within {seconds:g} s")
            return
        if now - said > SAY_SECONDS or (said == started and now - started > 1.0):
            said = now
            say(_progress(workers, seconds - (now - started)))
        time.sleep(POLL_SECONDS)


def _progress(workers: list[Child], left: float) -> str:
    count = sum(_requests(child) for child in workers if child.arguments[0] == "decode")
    what = "1 request is" if count == 1 else f"{count} requests are"
    return f"{what} under way, for {left:.0f} s more at most; Ctrl-C again ends at once"


def _requests(child: Child) -> int:
    """Return the requests that a worker has now; 0 if it does not answer."""
    url = child.ready_url.removesuffix("/ready") + "/metrics"
    try:
        with DIRECT.open(url, timeout=1.0) as answer:
            lines = answer.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(_COUNTED))
    except (HTTPException, urllib.error.URLError, OSError, ValueError):
        return 0
