"""Masks of tokens that a grammar does not allow, 32 tokens a word."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op

from .reference import LOWEST

_HERE = "tandem.kernels.sampling.bits"
KEEP_BITS: Op[Callable[[Tensor, Tensor, Tensor], None]] = Op(
    "sampling.keep_bits",
    {Backend.TORCH: f"{_HERE}.reference:keep_bits", Backend.TRITON: f"{_HERE}.triton:keep_bits"},
)


__all__ = ["KEEP_BITS", "LOWEST", "keep_bits"]


def keep_bits(
    logits: Tensor, words: Tensor, rows: Tensor, *, backend: Backend | None = None
) -> None:
    """Set tokens whose bit is 0 to -inf, others to at least ``LOWEST``, in place on float32,
    bfloat16 or float16 [rows, vocabulary].

    words are int32 [bounded, ceil(vocabulary / 32)], the lowest bit the lowest id. rows are int64
    [bounded], distinct: the row of logits of each; words of a negative row are ignored.
    """
    bounded = words.shape[0]
    checks.shape("logits", logits, None, None)
    checks.dense_last("logits", logits)
    checks.shape("words", words, bounded, -(-logits.shape[1] // 32))
    checks.kind("words", words, torch.int32)
    checks.dense_last("words", words)
    checks.shape("rows", rows, bounded)
    checks.kind("rows", rows, torch.int64)
    if bounded:
        KEEP_BITS.on(logits.device, backend)(logits, words, rows)
