"""Products with GGUF blocks: decoding against the gguf package, LLVM's kernels against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from tandem.kernels import Backend, BadTensor
from tandem.kernels.packed_gemm import FORMS, Packed, PackedWeights, packed_linear_add
from tandem.kernels.packed_gemm.reference import decoded

HALVES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}
"""Offsets of a block's float16 factors; (0, 2) for other kinds."""
MIXED = {"Q4_K": 9, "Q6_K": 6, "Q8_0": 8}
"""Outputs by kind."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def blocks_of(kind: str, outputs: int, inner: int) -> Tensor:
    """Draw rows of blocks of any bits, whose factors are finite and of both signs."""
    draw = torch.Generator().manual_seed(outputs * inner)
    if kind in FLOATS:
        weights = torch.randn(outputs, inner, generator=draw).to(FLOATS[kind])
        return weights.view(torch.uint8)
    values, size = FORMS[kind]
    count = outputs * inner // values
    blocks = torch.randint(0, 256, (count, size), generator=draw, dtype=torch.uint8)
    for at in HALVES.get(kind, (0, 2)):
        factors = torch.randn(count, 1, generator=draw).div_(64).half()
        blocks[:, at : at + 2] = factors.view(torch.uint8)
    return blocks.view(outputs, -1)


@pytest.mark.parametrize("kind", sorted(FORMS))
def test_decoded_weights_are_those_of_the_gguf_package(kind: str) -> None:
    blocks = blocks_of(kind, 5, 512)
    want = dequantize(blocks.numpy(), GGMLQuantizationType[kind])
    if kind in FLOATS:
        want = blocks.view(FLOATS[kind]).float().numpy()
    assert np.array_equal(decoded(blocks, kind).numpy(), want)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 18])
@pytest.mark.parametrize("kind", sorted(FORMS))
def test_products_on_several_threads_equal_the_reference(kind: str, rows: int) -> None:
    """The last tile of outputs and the last chunk of inputs are cut short, and no tensor but x is
    contiguous."""
    blocks = blocks_of(kind, 2053, 1280)[:, : 768 // FORMS[kind].values * FORMS[kind].size]
    weights = PackedWeights([Packed(blocks[:16], kind), Packed(blocks[16:], kind)])
    x = torch.randn(rows, 800)[:, :768]
    before = torch.randn(rows, 2060)
    want, got = before.clone(), before.clone()
    packed_linear_add(x, weights, want[:, 3:2056], backend=Backend.TORCH)
    packed_linear_add(x, weights, got[:, 3:2056], backend=Backend.LLVM)
    assert torch.equal(got[:, :3], before[:, :3])
    assert torch.equal(got[:, 2056:], before[:, 2056:])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("kind", sorted(FORMS))
def test_compiled_decoding_is_exact(kind: str, rows: int) -> None:
    """A row with a single one picks weights, of every place in a block."""
    weights = PackedWeights([Packed(blocks_of(kind, 3, 256), kind)])
    want, ones = decoded(*weights.parts[0]).T, torch.eye(256)
    for first in range(0, 252, rows):
        x, y = ones[first : first + rows], torch.zeros(rows, 3)
        packed_linear_add(x, weights, y, backend=Backend.LLVM)
        assert torch.equal(y, want[first : first + rows])


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_fewest_outputs_and_no_rows_are_computed(rows: int) -> None:
    blocks, x = blocks_of("Q4_1", 1, 32), torch.randn(rows, 32)
    weights = PackedWeights([Packed(blocks, "Q4_1")])
    got = packed_linear_add(x, weights, torch.zeros(rows, 1), backend=Backend.LLVM)
    torch.testing.assert_close(got, x @ decoded(blocks, "Q4_1").T)


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.LLVM])
def test_parts_of_several_kinds_are_side_by_side(backend: Backend) -> None:
    parts = [Packed(blocks_of(kind, outputs, 256), kind) for kind, outputs in MIXED.items()]
    x, weights = torch.randn(3, 256), PackedWeights(parts)
    got = packed_linear_add(x, weights, torch.zeros(3, 23), backend=backend)
    want = x @ torch.cat([decoded(*part) for part in parts]).T
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_tensor_that_does_not_fit_is_refused_by_name() -> None:
    x, y, blocks = torch.zeros(1, 256), torch.zeros(1, 3), torch.zeros(3, 144, dtype=torch.uint8)
    weights = PackedWeights([Packed(blocks, "Q4_K")])
    with pytest.raises(BadTensor, match="kind is 'Q3_K', expected one of F32"):
        PackedWeights([Packed(blocks, "Q3_K")])
    with pytest.raises(BadTensor, match="rows of 143 bytes, expected a multiple of 144"):
        PackedWeights([Packed(blocks[:, 1:], "Q4_K")])
    with pytest.raises(BadTensor, match="parts have 256, 32 inputs, expected the same number"):
        PackedWeights([*weights.parts, Packed(blocks[:, :20], "Q4_1")])
    with pytest.raises(BadTensor, match="x has shape"):
        packed_linear_add(x[:, :128], weights, y)
    with pytest.raises(BadTensor, match=r"x is torch\.bfloat16"):
        packed_linear_add(x.bfloat16(), weights, y)
