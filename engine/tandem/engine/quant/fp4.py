"""Weights in e2m1 (MXFP4, NVFP4), re-coded at load to e4m3 with a scale for each block.

A block of MXFP4 keeps its numbers if the exponents of its groups differ by at most 14: e4m3
has multiples of 2**-9, e2m1 those of 2**-1, and 6 * 2**6 is below 448. NVFP4 is rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.engine.config.quantization import Fp4Kind, Fp4Scheme
from tandem.engine.loader import LinearPart, LoadError, Weights
from tandem.engine.quant.base import Product
from tandem.engine.quant.fp8 import CODES, in_blocks, rounded
from tandem.engine.quant.scales import scalar
from tandem.kernels.fp8_gemm import BLOCK

logger = logging.getLogger(__name__)

_HIGHEST = 6
"""Exponent of the largest group's unit in a block's codes."""
_BIAS = 127
"""Exponent of 1 in e8m0."""
_NAN = 255
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_STRIP = 8 * BLOCK
"""Outputs that are re-coded at a time, which bounds the memory of decoded numbers."""
_GROUPS = {Fp4Kind.MX: 32, Fp4Kind.NV: 16, Fp4Kind.NV_MODELOPT: 16}
_NEWS = 1.1
"""Factor by which an error must exceed the largest so far to be logged."""


class Fp4Method:
    """Method of one kind of scales; logs each new largest error of the model's layers."""

    name = "fp4"

    def __init__(self, scheme: Fp4Scheme) -> None:
        self._kind = scheme.kind
        self._worst: float | None = None

    def load(self, source: Weights, parts: Sequence[LinearPart]) -> Product:
        return in_blocks(source, parts, self._read)

    def _read(self, source: Weights, part: LinearPart) -> tuple[Tensor, Tensor]:
        (outputs, inner), shard, group = part.shape, part.shard, _GROUPS[self._kind]
        if inner % group:
            raise LoadError(f"{part.prefix}: {inner} inputs are not groups of {group}")
        own = f"{part.prefix}.weight"
        name = own if self._kind is Fp4Kind.NV_MODELOPT else f"{own}_packed"
        packed = source.raw(name, torch.uint8, (outputs, inner // 2), shard)
        kind = torch.uint8 if self._kind is Fp4Kind.MX else CODES
        scale = source.raw(f"{own}_scale", kind, (outputs, inner // group), shard)
        return self.recoded(part.prefix, packed, scale, self._factor(source, own))

    def recoded(
        self, name: str, packed: Tensor, scale: Tensor, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return e4m3 codes [out, in] and the scale of each block of uint8 [out, in / 2] with the
        scale of each group. Raises LoadError, and logs the error under ``name``."""
        if factor is None and bool((scale == _NAN).any()):
            raise LoadError(f"{name}: a scale is not a number")
        strips = [
            self._strip(packed[at : at + _STRIP], scale[at : at + _STRIP], factor)
            for at in range(0, len(packed), _STRIP)
        ]
        codes, scales, errors, sizes = zip(*strips, strict=True)
        self._note(name, torch.stack(errors).sum(), torch.stack(sizes).sum())
        return torch.cat([each.view(torch.uint8) for each in codes]).view(CODES), torch.cat(scales)

    def _factor(self, source: Weights, own: str) -> Tensor | None:
        """Return the factor of all scales, a float32 number."""
        if self._kind is Fp4Kind.NV:
            return scalar(source, f"{own}_global_scale").reciprocal()
        return scalar(source, f"{own}_scale_2") if self._kind is Fp4Kind.NV_MODELOPT else None

    def _strip(
        self, packed: Tensor, scale: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return codes, scales, and the squared norms of the error and of the numbers."""
        numbers = decoded(packed)
        groups = numbers.double().view(*scale.shape, -1)
        if factor is None:
            units = torch.exp2(scale.double() - _BIAS)
            exact = (groups * units[..., None]).flatten(1)
            codes, scales = in_powers(numbers, scale)
        else:
            units = scale.double() * factor.double()
            exact = (groups * units[..., None]).flatten(1)
            codes, scales = rounded(exact.float())
        held = scales.double().repeat_interleave(BLOCK, 0)[: len(codes)]
        held = held.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]] * codes.double()
        return codes, scales, (held - exact).square().sum(), exact.square().sum()

    def _note(self, prefix: str, error: Tensor, size: Tensor) -> None:
        found = float((error / size.clamp(min=torch.finfo(torch.float64).tiny)).sqrt())
        if self._worst is not None and found <= self._worst * _NEWS:
            return
        self._worst = found
        form = "MXFP4" if self._kind is Fp4Kind.MX else "NVFP4"
        how = "exact" if not found else f"relative error {found:.4f} of {prefix}, the largest yet"
        logger.info("%s re-coded to fp8 blocks, %s", form, how)


def decoded(packed: Tensor) -> Tensor:
    """Return the e2m1 numbers float32 [out, in] of uint8 [out, in / 2], low bits first."""
    table = torch.tensor((*_NUMBERS, *(-each for each in _NUMBERS)), device=packed.device)
    nibbles = torch.stack((packed & 15, packed >> 4), 2).flatten(1)
    return table[nibbles.int()]


def in_powers(numbers: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and the scale of each block, a power of two, of numbers [out, in] times
    powers of two, e8m0 uint8 [out, in / 32]."""
    outputs, inner = numbers.shape
    groups = numbers.view(*exponents.shape, -1)
    used = exponents.int().masked_fill(~groups.any(2), 0)
    each = BLOCK // groups.shape[2]
    blocks = pad(used, (0, -used.shape[1] % each, 0, -outputs % BLOCK))
    top = blocks.view(blocks.shape[0] // BLOCK, BLOCK, -1, each).amax((1, 3))
    of_groups = top.repeat_interleave(BLOCK, 0)[:outputs].repeat_interleave(each, 1)
    shift = exponents.int() - of_groups[:, : used.shape[1]] + _HIGHEST
    codes = groups * torch.exp2(shift.clamp(max=_HIGHEST).float())[..., None]
    scale = torch.exp2((top - _BIAS - _HIGHEST).float())
    return codes.flatten(1)[:, :inner].to(CODES), scale
