"""Checks of tensors for op wrappers, which raise BadTensor; cheap, as each op of a step runs
them."""

from __future__ import annotations

from torch import Tensor, dtype, float32

from .errors import BadTensor


def shape(name: str, tensor: Tensor, *want: int | None) -> None:
    """Check that `tensor` has as many dimensions as `want`, each of that size (None: any size)."""
    have = tensor.shape
    if len(have) == len(want):
        for size, wanted in zip(have, want, strict=True):
            if wanted is not None and size != wanted:
                break
        else:
            return
    expected = ", ".join("any" if w is None else str(w) for w in want)
    raise BadTensor(f"{name} has shape {tuple(have)}, expected ({expected})")


def kind(name: str, tensor: Tensor, *want: dtype) -> None:
    """Check that `tensor` is of one of the dtypes `want`."""
    if tensor.dtype not in want:
        raise BadTensor(f"{name} is {tensor.dtype}, expected {' or '.join(str(w) for w in want)}")


def same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that `tensor` has the device and dtype of `other`."""
    if tensor.dtype != other.dtype:
        raise BadTensor(f"{name} is {tensor.dtype}, but {other_name} is {other.dtype}")
    if tensor.device != other.device:
        raise BadTensor(f"{name} is on {tensor.device}, but {other_name} is on {other.device}")


def stream(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that `tensor` is a residual stream for `other`: of its dtype, or of float32."""
    if tensor.dtype != float32:
        same(name, tensor, other_name, other)
    elif tensor.device != other.device:
        raise BadTensor(f"{name} is on {tensor.device}, but {other_name} is on {other.device}")


def dense_last(name: str, tensor: Tensor) -> None:
    """Check that the last dimension of `tensor` is dense."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise BadTensor(f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1")
