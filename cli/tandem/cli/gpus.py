"""GPUs of a local stack, without asking torch: each worker takes the next, and how full one is.

A worker computes on the first GPU that it sees. It sees the others behind it, so that KV can be
read straight from where a peer keeps it. Called by ``up``.
"""

from __future__ import annotations

import os
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASK = "nvidia-smi"
_ASK_SECONDS = 20.0


def visible_gpus() -> list[str]:
    """As CUDA names them: what the environment allows, else all of the machine; [] for none."""
    allowed = os.environ.get(VISIBLE)
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    answer = _ask("--query-gpu=index", "--format=csv,noheader")
    return [] if answer is None else answer.split()


def used_share(gpu: str) -> float | None:
    """Part of a GPU's memory that is in use, by whomever; None where the driver does not say."""
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
    """What worker number ``worker`` of a stack finds in its environment."""
    if len(gpus) < 2:
        return {}
    first = worker % len(gpus)
    return {VISIBLE: ",".join(gpus[first:] + gpus[:first])}
