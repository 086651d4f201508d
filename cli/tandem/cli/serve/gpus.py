"""Start order and memory shares of the workers of a local stack that share a GPU.

``gpu_memory_utilization`` includes other processes, so workers start one after the other: first
those with a size in bytes or blocks, then those with a share, lowest first. The rest divide what is
left. A starting worker may fill the device, except for the parts of workers that do not run.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from itertools import pairwise

from tandem.cli.serve.child_flags import ChildFlagsError
from tandem.cli.serve.children import Child
from tandem.cli.settings.flags import flag_of
from tandem.engine.config.cache import CacheConfig
from tandem.engine.config.engine import resolve_device
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ENV_PREFIX

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASK = "nvidia-smi"
_ASK_SECONDS = 20.0


def visible_gpus() -> list[str]:
    """Return CUDA's names of the visible GPUs; [] for none."""
    allowed = os.environ.get(VISIBLE)
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    answer = _ask("--query-gpu=index", "--format=csv,noheader")
    return [] if answer is None else answer.split()


def used_share(gpu: str) -> float | None:
    """Return the share of a GPU's memory in use; None if the driver does not report it."""
    values = "--query-gpu=memory.used,memory.total"
    answer = _ask(f"--id={gpu}", values, "--format=csv,noheader,nounits")
    try:
        used, total = map(float, (answer or "").split(","))
        return used / total
    except (ValueError, ZeroDivisionError):  # [N/A], or nothing
        return None


def _ask(*words: str) -> str | None:
    try:
        answer = subprocess.run(
            (_ASK, *words), capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout


def environment_of(worker: int, gpus: list[str]) -> dict[str, str]:
    """Return the environment variables of a stack's worker."""
    if len(gpus) < 2:
        return {}
    first = worker % len(gpus)
    return {VISIBLE: ",".join(gpus[first:] + gpus[:first])}


SHARE = "gpu_memory_utilization"
ENV_SHARE = ENV_PREFIX + SHARE.upper()
DIVIDED = CacheConfig().gpu_memory_utilization
"""Total share of workers without their own setting."""
_WHATEVER_IS_LEFT = frozenset({"kv_cache_memory_bytes", "num_gpu_blocks_override"})
"""Settings of workers with a fixed size."""
_ONLY = "0"
"""GPU of all workers if the machine reports none."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """Worker that computes on a GPU."""

    child: Child
    gpu: str
    given: Mapping[str, object]
    """Its engine settings."""
    arguments: Sequence[str]
    """Arguments of its first start."""

    @property
    def needs_turn(self) -> bool:
        return _WHATEVER_IS_LEFT.isdisjoint(self.given)

    @property
    def gets_share(self) -> bool:
        return self.needs_turn and SHARE not in self.given

    @property
    def level(self) -> float:
        """Return its start order: 0 without a turn, its share, or infinity if the stack sets it."""
        if not self.needs_turn:
            return 0.0
        return math.inf if self.gets_share else float(str(self.given[SHARE]))


def sharers(
    children: Sequence[Child], gpus: Sequence[str], given: Mapping[str, Mapping[str, object]]
) -> Iterator[Sharer]:
    """Yield the ``children`` that compute on a GPU.

    ``given`` are the engine settings of each role.
    """
    workers = [child for child in children if child.arguments[0] in given]
    for number, child in enumerate(workers):
        settings = given[child.arguments[0]]
        if resolve_device(str(settings.get("device", "auto"))) == "cuda":
            gpu = gpus[number % len(gpus)] if gpus else _ONLY
            yield Sharer(child, gpu, settings, tuple(child.arguments))


def check_shares(workers: Iterable[Sharer]) -> None:
    """Raise ChildFlagsError if a worker would find no free memory."""
    for group in _groups(workers):
        for first, second in pairwise(group.fixed):
            if first.level == second.level:
                text = f"more than {first.level:g} on GPU {group.gpu}: it counts what "
                text += f"{first.child.name} holds there, which may fill as much, and nothing "
                text += f"is left for {second.child.name}; without shares {DIVIDED:g} is divided"
                raise _refused(second, text)
        if group.fixed and group.getting and group.fixed[-1].level >= DIVIDED:
            names = ", ".join(each.child.name for each in group.getting)
            text = f"less than {DIVIDED:g} on GPU {group.gpu}: {names}, without a share, may take "
            text += f"what it leaves of {DIVIDED:g}, and nothing is left"
            raise _refused(group.fixed[-1], text)


def _refused(mine: Sharer, allowed: str) -> ChildFlagsError:
    error = InvalidParameter(SHARE, mine.level, allowed)
    return ChildFlagsError(f"flags of {mine.child.arguments[0]} workers: {error}")


@dataclass(slots=True)
class _Group:
    """Workers of one GPU, and their shares."""

    gpu: str
    members: list[Sharer] = field(default_factory=list)
    _taken: float | None = None

    @property
    def fixed(self) -> list[Sharer]:
        some = (each for each in self.members if 0.0 < each.level < math.inf)
        return sorted(some, key=lambda each: each.level)

    @property
    def getting(self) -> list[Sharer]:
        return [each for each in self.members if each.gets_share]

    def share_of(self, mine: Sharer) -> float:
        """Return the share to which ``mine`` may fill the device now: all but the shares of workers
        that do not run.
        """
        absent = [each for each in self.members if each is not mine and not each.child.is_running]
        top = DIVIDED if self.getting else self.fixed[-1].level
        return top - sum(self._part(each) for each in absent)

    def _part(self, mine: Sharer) -> float:
        """Return the share of ``mine`` alone. Not defined for sizes in bytes."""
        if mine.gets_share:
            return max(DIVIDED - self._before_divided(), 0.0) / len(self.getting)
        lower = [each.level for each in self.members if each.level < mine.level]
        return mine.level - max(lower, default=0.0)

    def _before_divided(self) -> float:
        """Return the share of earlier workers, by the driver if one has a size in bytes."""
        if self._taken is None:
            self._taken = self.fixed[-1].level if self.fixed else 0.0
            number = sum(not each.needs_turn for each in self.members)
            if number:
                used = used_share(self.gpu)
                supposed = DIVIDED * number / len(self.members)
                self._taken = max(self._taken, supposed if used is None else used)
        return self._taken


def _groups(workers: Iterable[Sharer]) -> list[_Group]:
    found: dict[str, _Group] = {}
    for each in workers:
        found.setdefault(each.gpu, _Group(each.gpu)).members.append(each)
    return list(found.values())


class Turns:
    """Start order of workers."""

    def __init__(self, workers: Iterable[Sharer] = (), *, patience: float = 0.0):
        """``patience``: seconds to wait for a worker that is not ready."""
        self._patience = patience
        self._groups = _groups(workers)

    def described(self) -> Iterator[str]:
        """Yield a line for each GPU whose workers start in turn."""
        for group in self._groups:
            if len(group.members) < 2 or not any(each.needs_turn for each in group.members):
                continue
            names = ", ".join(each.child.name for each in group.members)
            text = f"{names} share GPU {group.gpu} and start one after the other"
            divided = [each.child.name for each in group.getting]
            if len(divided) == len(group.members):
                text += f"; {DIVIDED:g} of its memory is divided evenly among them"
            elif divided:
                text += f"; {', '.join(divided)} may take what others leave of {DIVIDED:g}"
            yield f"{text} (--gpu-memory-utilization)"

    def admit(self, child: Child) -> bool:
        """Return whether ``child`` may start now. If so, set its share."""
        for group in self._groups:
            for mine in group.members:
                if mine.child is child:
                    return self._admit(mine, group)
        return True

    def _admit(self, mine: Sharer, group: _Group) -> bool:
        others = [each for each in group.members if each is not mine]
        if not mine.needs_turn or not others:
            return True
        if any(_goes_first(each, mine) or self._is_starting(each.child) for each in others):
            return False
        if mine.gets_share:
            mine.child.environment[ENV_SHARE] = f"{group.share_of(mine):.4f}"
        elif mine.child.exit_code is not None:  # a flag overrides any other setting
            share = f"{group.share_of(mine):.4f}"
            mine.child.arguments = [*mine.arguments, flag_of(SHARE), share]
        return True

    def _is_starting(self, child: Child) -> bool:
        """Return whether a child may be about to allocate its memory."""
        if not child.is_running or child.ready or child.check_ready():
            return False
        return time.monotonic() - child.started < self._patience


def _goes_first(other: Sharer, mine: Sharer) -> bool:
    """Return whether ``other`` is not running and starts before ``mine``."""
    return not other.child.is_running and other.level < mine.level
