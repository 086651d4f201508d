"""KV pages as boxes of tensor descriptors for Gluon's kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def layout_of(dim: int, item_bytes: int) -> gl.NVMMASharedLayout:
    """Return the layout of rows of ``dim`` numbers, 64 or 128, in shared memory."""
    swizzle = min(128, dim * item_bytes)
    return gl.NVMMASharedLayout(swizzle, element_bitwidth=8 * item_bytes, rank=2)


class TokenRows(NamedTuple):
    """A layer's view of the KV cache as rows of head_dim, one a token of a KV head."""

    kv: Tensor
    """[num_blocks, 2, kv_heads, block_size, head_dim], dense pages."""
    block: int
    """Rows from one block to the next."""
    two: int
    """Rows from K to V."""
    head: int
    """Rows from one KV head to the next."""

    @classmethod
    def of(cls, kv: Tensor) -> TokenRows:
        return cls(kv, *(kv.stride(axis) // kv.shape[4] for axis in (0, 1, 2)))

    def boxes(self, tokens: int) -> TensorDescriptor:
        """Return a descriptor whose boxes are ``tokens`` tokens of a page."""
        blocks, _, heads, page, dim = self.kv.shape
        count = (blocks - 1) * self.block + self.two + (heads - 1) * self.head + page
        layout = layout_of(dim, self.kv.element_size())
        return TensorDescriptor(self.kv, [count, dim], [dim, 1], [tokens, dim], layout)
