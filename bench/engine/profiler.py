"""Which kernels a step is made of, and what each takes: torch's profiler over some steps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from rig import Rig
from torch.profiler import ProfilerActivity, profile


def kernels_of(work: Callable[[], int]) -> dict[str, Any]:
    """Kernels of ``work``, which says how many steps it took: µs and launches a step of each."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        steps = work()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    first, last = float("inf"), 0.0
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = _short(event.name)
            times[name] += event.time_range.elapsed_us()
            counts[name] += 1
            first, last = min(first, event.time_range.start), max(last, event.time_range.end)
    rows = [
        {"kernel": name, "us": us / steps, "launches": counts[name] / steps}
        for name, us in sorted(times.items(), key=lambda item: -item[1])
    ]
    busy = sum(times.values()) / steps
    return {"steps": steps, "span_us": (last - first) / steps, "busy_us": busy, "kernels": rows}


def decode(rig: Rig, batch: int, context: int, steps: int = 8) -> dict[str, Any]:
    """Decode steps of one batch."""
    rig.gather(batch, context, 200)

    def work() -> int:
        for _ in range(steps):
            rig.step()
        return steps

    found = kernels_of(work)
    rig.abort_all()
    return {"what": f"decode of {batch} at {context}", **found}


def mixed(rig: Rig, batch: int, chunk: int) -> dict[str, Any]:
    """A prompt that comes to a batch of decodes: one mixed step, and a decode step after it."""
    rig.gather(batch, 1024, 200)

    def work() -> int:
        rig.add(chunk, 8)
        for _ in range(2):
            rig.step()
        torch.cuda.synchronize()
        return 1

    work()
    found = kernels_of(work)
    rig.abort_all()
    return {"what": f"prompt of {chunk} with {batch} decodes, and a decode step", **found}


def prompt(rig: Rig, length: int) -> dict[str, Any]:
    """One prompt."""

    def work() -> int:
        rig.add(length, 1)
        rig.drain()
        return 1

    work()
    return {"what": f"prompt of {length}", **kernels_of(work)}


def _short(name: str) -> str:
    name = re.sub(r"<.*", "", name.removeprefix("void "))
    return name.split("(")[0][:90]
