"""Jit code of programmatic dependent launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait for the kernel before this one, then let the one after it start.

    In this order, so that whoever starts knows that everything up to two launches ago has ended.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
