"""Prefixes that workers pull from each other while they are hurt: how many came, how many did not.

Counters go with a worker that is killed, so they are looked at all the while: what one counted
between the last look and its end is missing.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from http.client import HTTPException

from stack import Stack

FLAGS = {
    "worker_flags": [
        *("--kv-pull-peers", "3", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"),
    ],
    "router_flags": [
        *("--no-strict-handoff", "--target-ttft-ms", "60000", "--target-itl-ms", "60000"),
    ],
}
"""Every worker may pull from every other, and has so few seats that who holds a prefix is often
full, and so short steps that computing takes longer than pulling."""
EVERY_SECONDS = 0.25
_CAME = "tandem:kv_prefix_pulls_total"
_FELL_BACK = 'tandem:kv_prefix_pull_fallbacks_total{reason="'


class PullWatch:
    """Counts of a stack's pulls, over all lives of its workers."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._of_lives: dict[tuple[str, int], dict[str, float]] = {}
        """The newest numbers of a worker, by its name and process."""
        self._before: dict[tuple[str, int], dict[str, float]] = {}
        """As they were when it began to look."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Look from now on; what was counted before does not count."""
        self.look()
        self._before = dict(self._of_lives)
        self._thread.start()

    def stop(self) -> None:
        """Look a last time, unless that was done."""
        if self._thread.is_alive():
            self._done.set()
            self._thread.join(30)
            self.look()

    def look(self) -> None:
        for name, child in self._stack.workers.items():
            process = child.process
            if process is None:
                continue
            with suppress(OSError, ValueError, HTTPException):  # killed as it answers
                samples = self._stack.metrics(name)
                self._of_lives[name, process.pid] = {
                    sample: value
                    for sample, value in samples.items()
                    if sample == _CAME or sample.startswith(_FELL_BACK)
                }

    @property
    def came(self) -> int:
        return self._sum(_CAME)

    @property
    def fell_back(self) -> Counter[str]:
        """Prefixes that were computed after all, by why."""
        names = {name for life in self._of_lives.values() for name in life}
        found = {
            name.removeprefix(_FELL_BACK).partition('"')[0]: self._sum(name)
            for name in names
            if name.startswith(_FELL_BACK)
        }
        return Counter({reason: count for reason, count in found.items() if count})

    def __str__(self) -> str:
        why = ", ".join(f"{reason} {count}" for reason, count in self.fell_back.most_common())
        words = f"{self.came} prefixes pulled, {self.fell_back.total()} computed after all"
        return f"{words} ({why})" if why else words

    def problems(self) -> list[str]:
        """A run in which nothing was pulled has shown nothing of pulls."""
        return [] if self.came else [f"no prefix was pulled: {self}"]

    def _run(self) -> None:
        while not self._done.wait(EVERY_SECONDS):
            self.look()

    def _sum(self, name: str) -> int:
        def total(lives: dict[tuple[str, int], dict[str, float]]) -> float:
            return sum(each.get(name, 0.0) for each in lives.values())

        return int(total(self._of_lives) - total(self._before))
