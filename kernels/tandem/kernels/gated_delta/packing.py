"""State of one sequence and layer in a block, float32 [value heads, numbers].

A head's first key_dim * value_dim numbers are its matrix. The rest of all heads together are the
last tokens of the convolution, [channels, history], and padding.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from . import DeltaShape


def unpacked(held: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor]:
    """Return the matrices [rows, value heads, key_dim, value_dim], in the same memory, and the
    convolution's tokens [rows, channels, history] of blocks [rows, value heads, numbers]."""
    matrix = shape.key_dim * shape.value_dim
    states = held[:, :, :matrix].view(*held.shape[:2], shape.key_dim, shape.value_dim)
    rest = held[:, :, matrix:].flatten(1)[:, : shape.channels * shape.history]
    return states, rest.view(len(held), shape.channels, shape.history)


def put_tokens(held: Tensor, tokens: Tensor, shape: DeltaShape) -> None:
    """Write the convolution's tokens [rows, channels, history] into blocks, in place."""
    rest, flat = held[:, :, shape.key_dim * shape.value_dim :], tokens.flatten(1)
    padding = rest.shape[1] * rest.shape[2] - flat.shape[1]
    rest.copy_(pad(flat, (0, padding)).view(rest.shape))
