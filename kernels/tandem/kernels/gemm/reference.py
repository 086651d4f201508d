"""Products in plain torch, for CPUs and for many rows on a GPU; the residual is added within the
product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from tandem.kernels.activation import silu_and_mul
from tandem.kernels.norm import rms_norm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See the wrapper; cuBLAS can keep its sums, a CPU's product cannot."""
    if out_dtype == x.dtype:
        return torch_linear(x, weight, bias)
    if x.device.type != "cuda":
        return torch_linear(x, weight, bias).to(out_dtype)
    product = torch.mm(x, weight.t(), out_dtype=out_dtype)
    return product if bias is None else product.add_(bias)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """See the wrapper."""
    if residual.dtype != x.dtype:
        return residual.add_(linear(x, weight, None, residual.dtype))
    return residual.addmm_(x, weight.t())


def norm_linear(x: Tensor, gain: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See the wrapper."""
    return torch_linear(rms_norm(x, gain, eps), weight, bias)


def norm_gated(x: Tensor, gain: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See the wrapper."""
    return silu_and_mul(torch_linear(rms_norm(x, gain, eps), weight))
