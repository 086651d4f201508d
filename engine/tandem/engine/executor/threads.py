"""How a CPU's threads wait for each other, set before torch brings its thread pool.

GNU OpenMP's threads spin for milliseconds at the end of every parallel region. Where another
process wants the core (a prefill and a decode worker on one host, a router) a spinning thread keeps
the one it waits for from running: measured on two busy cores, a decode step took 600 ms instead of
80. Passive threads sleep, which costs an idle host microseconds a region.

No torch here: the variable counts only for a process that has not imported it yet. Called by
executors; entry points that import torch earlier call it first.
"""

from __future__ import annotations

import os

WAIT_POLICY = "OMP_WAIT_POLICY"


def wait_passively() -> None:
    """Let OpenMP's threads sleep when they wait, unless the environment says otherwise."""
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
