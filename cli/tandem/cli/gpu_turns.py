"""When workers of a local stack that share a GPU start, and how far each may fill its memory.

A worker's share of a device (``gpu_memory_utilization``) counts what others hold there. Two that
start at once both find the device empty, and both take all of it; of two with half of it each, who
starts later finds its half taken. So they start one after the other, and of n workers each may
fill an n-th more of what is divided than those beside it that run. Who was told
its share keeps it, and goes before those; who was told bytes or blocks needs no turn.
Called by ``up``, which starts the processes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.cli.children import Child
from tandem.engine.config.cache import CacheConfig
from tandem.engine.config.engine import resolve_device
from tandem.protocol.names import ENV_PREFIX

ENV_SHARE = ENV_PREFIX + "GPU_MEMORY_UTILIZATION"
DIVIDED = CacheConfig().gpu_memory_utilization
"""Share of a device that its workers have together."""
_SHARE = "gpu_memory_utilization"
_WHATEVER_IS_LEFT = frozenset({"kv_cache_memory_bytes", "num_gpu_blocks_override"})
"""Settings of whoever takes as much as they say, whatever the device has left."""
_ONLY = "0"
"""The GPU of all workers where the machine does not say which it has: each takes its first."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A worker that computes on a GPU with others, or alone."""

    child: Child
    gpu: str
    given: Collection[str]
    """Names of the engine's settings that it was given."""

    @property
    def needs_turn(self) -> bool:
        """Whether it takes a share of what it finds."""
        return _WHATEVER_IS_LEFT.isdisjoint(self.given)

    @property
    def gets_share(self) -> bool:
        """Whether its share is the stack's to say."""
        return self.needs_turn and _SHARE not in self.given


def sharers(
    children: Sequence[Child], gpus: Sequence[str], given: Mapping[str, Mapping[str, object]]
) -> Iterator[Sharer]:
    """The workers among ``children`` that compute on a GPU, as ``gpus.environment_of`` says which.

    ``given`` are the engine's settings that each role was given.
    """
    workers = [child for child in children if child.arguments[0] in given]
    for number, child in enumerate(workers):
        told = given[child.arguments[0]]
        if resolve_device(str(told.get("device", "auto"))) == "cuda":
            yield Sharer(child, gpus[number % len(gpus)] if gpus else _ONLY, told)


class Turns:
    """Who may start now. Whoever is not among the sharers may, at any time."""

    def __init__(self, workers: Iterator[Sharer] | Sequence[Sharer] = (), *, patience: float = 0.0):
        """``patience``: seconds that others wait for one that has started and is not ready."""
        self._patience = patience
        self._groups: dict[str, list[Sharer]] = defaultdict(list)
        for worker in workers:
            self._groups[worker.gpu].append(worker)

    def described(self) -> Iterator[str]:
        """A line for each GPU on which workers have turns."""
        for gpu, group in self._groups.items():
            if len(group) < 2 or not any(each.needs_turn for each in group):
                continue
            names = ", ".join(each.child.name for each in group)
            text = f"{names} share GPU {gpu} and start one after the other"
            divided = [each.child.name for each in group if each.gets_share]
            if len(divided) == len(group):
                text += f"; {DIVIDED:g} of its memory is divided evenly among them"
            elif divided:
                text += f"; {', '.join(divided)} may take what others leave of {DIVIDED:g}"
            yield f"{text} (--gpu-memory-utilization)"

    def admit(self, child: Child) -> bool:
        """Whether ``child`` may start now; if so, its environment says its share."""
        for group in self._groups.values():
            for mine in group:
                if mine.child is child:
                    return self._admit(mine, [each for each in group if each is not mine])
        return True

    def _admit(self, mine: Sharer, others: Sequence[Sharer]) -> bool:
        if not mine.needs_turn or not others:
            return True
        if any(_goes_first(each, mine) or self._is_starting(each.child) for each in others):
            return False
        if mine.gets_share:
            running = sum(each.child.is_running for each in others)
            part = DIVIDED * (running + 1) / (len(others) + 1)
            mine.child.environment[ENV_SHARE] = f"{part:.4f}"
        return True

    def _is_starting(self, child: Child) -> bool:
        """Whether it may be about to take its memory."""
        if not child.is_running or child.ready or child.check_ready():
            return False
        return time.monotonic() - child.started < self._patience


def _goes_first(other: Sharer, mine: Sharer) -> bool:
    """Whether ``other`` was not started yet and takes what it was told to, not what is left."""
    is_new = not other.child.is_running and other.child.exit_code is None
    return is_new and (not other.needs_turn or (mine.gets_share and not other.gets_share))
