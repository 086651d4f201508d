"""Ops on tensors: attention over paged KV, norms, rotary + KV write, sampling, block moves.

Each op has a folder with a typed wrapper (`__init__.py`: checks, dispatch) and a file per backend.
`reference.py`, in plain torch, is the CPU's backend, and the others are tested against it.
"""

from __future__ import annotations

from .errors import BadTensor, NoBackend
from .registry import Backend, Op, ops

__all__ = ["Backend", "BadTensor", "NoBackend", "Op", "ops"]
