"""What a worker asks its device for in the middle of a step: kernels, graphs, memory.

Called by this folder's ``install`` within a worker.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from types import ModuleType
from typing import Any

from bench.pair.stalls.watcher import Notes

KERNEL_SECONDS = 0.0005
CALLS = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams")
HOST_CALLS = ("num_host_alloc", "num_host_free")
SHOWN = 200
"""Characters of a kernel's specialization."""

_notes: list[Notes] = []
"""Of this process, once it is a worker."""
_graphs: deque[tuple[int, str]] = deque(maxlen=4)
"""The last steps, and how each was run."""


def tell(notes: Notes) -> None:
    """Note kernels there from now on."""
    _notes.append(notes)


def how_run(step: int) -> str:
    """In which graph a step was run, if it is one of the last."""
    return next((text for number, text in reversed(_graphs) if number == step), "")


class Allocations:
    """How often torch has asked its device and the host for memory, as against the last look."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._last: dict[str, int] = {}
        self._looked = time.monotonic()

    def _counts(self) -> dict[str, int]:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return {}
        stats = torch.cuda.memory.memory_stats_as_nested_dict()
        found = {name: int(stats[name]) for name in CALLS if name in stats}
        if "segment" in stats:
            found["segments"] = int(stats["segment"]["all"]["current"])
        host: dict[str, int] = getattr(
            torch.cuda.memory, "host_memory_stats_as_nested_dict", dict[str, int]
        )()
        return found | {name: int(host[name]) for name in HOST_CALLS if name in host}

    def changed(self) -> str:
        """In words, since the last look; "" where there is no such device."""
        counts, before, since = self._counts(), self._last, self._looked
        self._last, self._looked = counts, time.monotonic()
        if not counts:
            return ""
        grown = {name: n - before.get(name, n) for name, n in counts.items()}
        what = ", ".join(f"{name} {n:+d}" for name, n in grown.items() if n) or "nothing"
        return f"torch's memory in {1e3 * (self._looked - since):.0f} ms: {what}"

    def look(self) -> None:
        """Note what has changed, so that a slow step's changes are told from earlier ones."""
        since, text = self._looked, self.changed()
        if text and not text.endswith("nothing"):
            self._notes.put(since, self._looked, "memory", text)


def watch_graphs(runner: ModuleType) -> None:
    """Remember whether steps run as graphs."""
    owner = runner.ModelRunner
    compute, forward = owner._compute, owner._forward
    step = [0]

    @functools.wraps(compute)
    def computes(self: Any, plan: Any, *args: Any) -> Any:
        step[0] = plan.step
        return compute(self, plan, *args)

    @functools.wraps(forward)
    def forwards(*args: Any) -> Any:
        found = forward(*args)
        inputs = found[1]
        how = f"in the graph {tuple(inputs.shape)}" if inputs.padded else "kernel by kernel"
        _graphs.append((step[0], f", {how}"))
        return found

    owner._compute, owner._forward = computes, forwards


def watch_kernels(module: ModuleType) -> None:
    """Note kernels that Triton compiles (or finds in its folder), and loads. By the methods that
    do it, the same in Triton 3.6 and 3.9: its hooks differ."""
    if module.__name__.endswith("jit"):
        _timed(module, "JITFunction", "_do_compile", "compiled")
    else:
        _timed(module, "CompiledKernel", "_init_handles", "loaded")


def _timed(module: ModuleType, of: str, name: str, what: str) -> None:
    owner = getattr(module, of)
    was = getattr(owner, name, None)
    if was is None:
        now = time.monotonic()
        for notes in _notes:
            notes.put(now, now, "kernel", f"this Triton has no {of}.{name}: nothing is noted of it")
        return

    @functools.wraps(was)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return was(self, *args, **kwargs)
        finally:
            now = time.monotonic()
            if now - began > KERNEL_SECONDS:
                kernel = getattr(self, "fn", None)
                called = getattr(kernel, "__name__", None) or getattr(self, "name", "a kernel")
                text = f"Triton {what} {called} in {1e3 * (now - began):.1f} ms"
                if args:
                    text += f": {str(args[0])[:SHOWN]}"
                for notes in _notes:
                    notes.put(began, now, "kernel", text)

    setattr(owner, name, timed)
