"""Which GPU each worker of a local stack takes: one after the other, without asking torch.

A worker computes on the first GPU that it sees. It sees the others behind it, so that KV can be
read straight from where a peer keeps it. Called by ``up``.
"""

from __future__ import annotations

import os
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASK = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
_ASK_SECONDS = 20.0


def visible_gpus() -> list[str]:
    """As CUDA names them: what the environment allows, else all of the machine; [] for none."""
    allowed = os.environ.get(VISIBLE)
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    try:
        answer = subprocess.run(
            _ASK, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


def environment_of(worker: int, gpus: list[str]) -> dict[str, str]:
    """What worker number ``worker`` of a stack finds in its environment."""
    if len(gpus) < 2:
        return {}
    first = worker % len(gpus)
    return {VISIBLE: ",".join(gpus[first:] + gpus[:first])}
