"""Penalties in Triton, one launch. Roofline: the logits of the pairs read and written once."""

from __future__ import annotations

import triton
from torch import Tensor

from tandem.kernels.launch import dependent
from tandem.kernels.sampling.types import Penalties

from .triton_kernels import penalize_pairs

_BLOCK = 128


def penalize(logits: Tensor, penalties: Penalties) -> None:
    """See the wrapper."""
    pairs = penalties.rows.numel()
    if pairs:
        penalize_pairs[(triton.cdiv(pairs, _BLOCK),)](
            logits, *penalties, logits.stride(0), pairs, BLOCK=_BLOCK, **dependent(logits.device)
        )
