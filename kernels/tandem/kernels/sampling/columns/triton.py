"""Parameters of a step in Triton. Roofline: one launch; the numbers are a few kilobytes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tandem.kernels.bits import GAMMA, signed
from tandem.kernels.launch import dependent
from tandem.kernels.sampling.rng import Purpose
from tandem.kernels.sampling.types import Filters

from . import Columns, Gathered
from .triton_kernels import gather_columns

_BLOCK = 128


def gather(columns: Columns, rows: Tensor, draws: Tensor) -> Gathered:
    """See the wrapper."""
    n, m = rows.shape[0], draws.shape[1]
    size = triton.cdiv(max(n, m, 1), _BLOCK) * _BLOCK  # so that every column begins aligned
    wide = torch.empty(2, size, dtype=torch.int64, device=rows.device)
    narrow = torch.empty(3, size, dtype=torch.float32, device=rows.device)
    if n or m:
        gather_columns[(triton.cdiv(max(n, m), _BLOCK),)](
            *columns,
            rows,
            draws,
            wide,
            narrow,
            n,
            m,
            size,
            LAST=signed((int(Purpose.TOKEN) + 1) * GAMMA),
            BLOCK=_BLOCK,
            **dependent(rows.device),
        )
    temperature, min_p, top_p = narrow[:, :n].unbind()
    return Gathered(wide[1, :m], temperature, Filters(min_p, wide[0, :n], top_p))
