"""Products with weights in the blocks of a GGUF file, or in floats, straight from the file's bytes.

Sums are float32, and weights are decoded to float32 exactly. On a CPU the weight is never held in
another form, so mapped files are read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op


class Form(NamedTuple):
    """Encoding of a block of weights."""

    values: int
    """Values of a block."""
    size: int
    """Bytes of a block."""


FORMS: Mapping[str, Form] = {
    "F32": Form(32, 128),
    "F16": Form(32, 64),
    "BF16": Form(32, 64),
    "Q4_0": Form(32, 18),
    "Q4_1": Form(32, 20),
    "Q5_0": Form(32, 22),
    "Q5_1": Form(32, 24),
    "Q8_0": Form(32, 34),
    "Q4_K": Form(256, 144),
    "Q5_K": Form(256, 176),
    "Q6_K": Form(256, 210),
}
"""Forms by ggml's names. Rows are whole blocks; those of floats are cut into blocks here."""


class Packed(NamedTuple):
    """Weights [out, in] of one form."""

    blocks: Tensor
    """uint8 [out, bytes of a row]; the last dimension is dense."""
    kind: str
    """One of ``FORMS``."""

    @property
    def inputs(self) -> int:
        form = FORMS[self.kind]
        return self.blocks.shape[1] // form.size * form.values


class PackedWeights:
    """Weights of the same inputs, their outputs in order. They are checked once, and stay where
    they are."""

    def __init__(self, parts: Sequence[Packed]) -> None:
        """Raises BadTensor."""
        for part in parts:
            _check(part)
        self.parts = tuple(parts)
        self.inputs = parts[0].inputs
        ends = list(accumulate(len(part.blocks) for part in parts))
        self.outputs = ends[-1]
        self.columns = tuple(
            slice(end - len(part.blocks), end) for part, end in zip(parts, ends, strict=True)
        )
        """Outputs of each part among all."""
        if any(part.inputs != self.inputs for part in parts):
            each = ", ".join(str(part.inputs) for part in parts)
            raise BadTensor(f"parts have {each} inputs, expected the same number")


def _check(part: Packed) -> None:
    if part.kind not in FORMS:
        raise BadTensor(f"kind is {part.kind!r}, expected one of {', '.join(FORMS)}")
    size = FORMS[part.kind].size
    checks.shape("blocks", part.blocks, None, None)
    if not part.blocks.shape[1] or part.blocks.shape[1] % size:
        given = part.blocks.shape[1]
        raise BadTensor(f"blocks has rows of {given} bytes, expected a multiple of {size}")
    checks.kind("blocks", part.blocks, torch.uint8)
    checks.dense_last("blocks", part.blocks)


PackedLinearAdd = Callable[[Tensor, PackedWeights, Tensor], None]
PACKED_LINEAR_ADD: Op[PackedLinearAdd] = Op(
    "packed_gemm.packed_linear_add",
    {
        Backend.TORCH: "tandem.kernels.packed_gemm.reference:packed_linear_add",
        Backend.LLVM: "tandem.kernels.packed_gemm.llvm:packed_linear_add",
    },
)


def packed_linear_add(
    x: Tensor, weights: PackedWeights, y: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Add x @ decoded(weights).T to y in place, and return it.

    x is float32 [rows, in], y float32 [rows, out]. The last dimensions are dense. Raises BadTensor.
    """
    checks.shape("x", x, None, weights.inputs)
    checks.shape("y", y, x.shape[0], weights.outputs)
    for name, tensor in (("x", x), ("y", y)):
        checks.kind(name, tensor, torch.float32)
        checks.dense_last(name, tensor)
    PACKED_LINEAR_ADD.on(x.device, backend)(x, weights, y)
    return y
