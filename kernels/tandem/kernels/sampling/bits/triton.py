"""Bits in Triton, one launch. Roofline: the logits of the rows read and written once."""

from __future__ import annotations

import triton
from torch import Tensor

from tandem.kernels.launch import dependent

from .triton_kernels import keep_bits_of_rows

_WORDS = 64


def keep_bits(logits: Tensor, words: Tensor, rows: Tensor) -> None:
    """See the wrapper."""
    bounded, count = words.shape
    keep_bits_of_rows[(bounded, triton.cdiv(count, _WORDS))](
        logits, words, rows, logits.stride(0), words.stride(0), logits.shape[1], count,
        WORDS=_WORDS, **dependent(logits.device),
    )  # fmt: skip
