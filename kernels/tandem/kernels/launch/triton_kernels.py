"""Jit code of programmatic dependent launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernel before this one and for what it wrote."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the kernel after this one start, once every program has come here or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait for the kernel before this one, then let the one after it start.

    In this order, a kernel that starts may rely on the end of all kernels up to two launches ago.
    """
    wait(PDL)
    release(PDL)


@triton.jit
def let_go(PDL: tl.constexpr):
    """Let the kernel after this one start at once; then wait.

    For small kernels between two products, so that the second prefetches weights. Such a kernel
    may, before its own wait, only read data that no step writes.
    """
    release(PDL)
    wait(PDL)


@triton.jit
def prefetch(address):
    """Prefetch the 128-byte line at each int64 address to L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1
    )
