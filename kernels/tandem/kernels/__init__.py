"""Ops on tensors: attention over paged KV, norms, rotary + KV write, sampling, block moves.

A leaf: it knows no request, no model and no scheduler. Each op has a folder with a typed wrapper
(`__init__.py`: checks, then dispatch) and one file per backend; `reference.py`, in plain torch, is
what the other backends are held to and what a CPU runs. Called by tandem.engine (the run half) and
tandem.kvtransfer (pack, unpack, digest).
"""

from __future__ import annotations

from .errors import BadTensor, KernelError, NoBackend
from .registry import Backend, Op, ops

__all__ = ["Backend", "BadTensor", "KernelError", "NoBackend", "Op", "ops"]
