"""GPUs of a local stack, without torch: assignment to workers, and memory in use.

A worker computes on the first GPU that it sees. It sees the other GPUs after it, so that KV can be
read directly from a peer's GPU. Called by ``up``.
"""

from __future__ import annotations

import os
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASK = "nvidia-smi"
_ASK_SECONDS = 20.0


def visible_gpus() -> list[str]:
    """Return CUDA's names of the GPUs that the environment allows, else of all; [] for none."""
    allowed = os.environ.get(VISIBLE)
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    answer = _ask("--query-gpu=index", "--format=csv,noheader")
    return [] if answer is None else answer.split()


def used_share(gpu: str) -> float | None:
    """Return the share of a GPU's memory in use. None if the driver does not report it."""
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
    """Return the environment variables of worker number ``worker`` of a stack."""
    if len(gpus) < 2:
        return {}
    first = worker % len(gpus)
    return {VISIBLE: ",".join(gpus[first:] + gpus[:first])}
