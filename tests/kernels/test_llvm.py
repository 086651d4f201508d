"""LLVM's kernels of a CPU against the references in torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from llvmlite import ir
from torch import Tensor

from tandem.kernels import Backend
from tandem.kernels.activation import SILU_AND_MUL
from tandem.kernels.attention.batch import PagedBatch, Scores
from tandem.kernels.attention.decode import DECODE
from tandem.kernels.llvm.build import LANES, Kernel, exp
from tandem.kernels.llvm.compiled import agrees, compiled
from tandem.kernels.norm import RMS_NORM
from tandem.kernels.rotary_kv import ROTARY_KV, QKNorm, Rotation, SlotMapping
from tandem.kernels.testing import hold

SHAPES = [(1, 64), (5, 576), (5, 72), (700, 576)]
"""Rows and numbers: one row, whole vectors, a cut one, and rows for several threads."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "dim"), SHAPES)
def test_norms_equal_the_reference(rows: int, dim: int) -> None:
    hold(RMS_NORM, Backend.LLVM, drawn(rows, dim + 8)[:, :dim], drawn(dim), 1e-5)


@pytest.mark.parametrize(("rows", "dim"), SHAPES)
def test_gates_equal_the_reference(rows: int, dim: int) -> None:
    hold(SILU_AND_MUL, Backend.LLVM, drawn(rows, 2 * dim + 8)[:, : 2 * dim] * 20)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (7, 32), (5, 48), (300, 64)])
def test_rotations_and_written_pages_equal_the_reference(
    tokens: int, dim: int, normed: bool
) -> None:
    """Pages are a layer's view of a cache of two layers."""
    kv = torch.zeros(2 * tokens, 2, 2, 2, 8, dim)[:, 1]
    slots = SlotMapping(torch.randperm(2 * tokens)[:tokens], torch.randint(0, 8, (tokens,)))
    norm = QKNorm(drawn(dim), drawn(dim) + 1, 1e-5) if normed else None
    rotation = Rotation(*drawn(tokens, 2 * dim).tensor_split(2, 1))
    hold(ROTARY_KV, Backend.LLVM, drawn(tokens, 10, dim), kv, rotation, slots, norm, None)


@pytest.mark.parametrize(
    "scores",
    [Scores(0.2), Scores(0.2, window=21), Scores(0.2, window=1), Scores(0.2, softcap=5.0)],
    ids=["all", "window", "one key", "softcap"],
)
@pytest.mark.parametrize("dim", [16, 64, 72, 128])
def test_attention_of_decodes_equals_the_reference(scores: Scores, dim: int) -> None:
    """Tokens after a sequence's last are NaN, as in a reused block."""
    lens = torch.tensor([1, 16, 17, 121, 8, 350], dtype=torch.int32)
    block_size = 24
    columns = -(-350 // block_size)
    tables = torch.randperm(6 * columns).int().view(6, columns)
    kv = drawn(6 * columns, 3, 2, 2, block_size, dim)[:, 1]
    for table, length in zip(tables.tolist(), lens.tolist(), strict=True):
        kv[table[length // block_size], :, :, length % block_size :] = float("nan")
    batch = PagedBatch(torch.arange(7, dtype=torch.int32), lens, tables, 1, 350)
    hold(DECODE, Backend.LLVM, drawn(6, 10, dim)[:, :6], kv, batch, scores, None)


def test_powers_are_those_of_float64() -> None:
    """Powers below e^-87 and above e^88 are those of the bounds; NaN stays."""
    module = ir.Module("powers")
    k = Kernel(module, "powers", ["x", "count"])
    with k.loop(k.fields["count"], step=LANES) as at:
        k.put(exp(k.b, k.floats(k.pointer("x"), at)), k.pointer("x"), at)
    k.b.ret_void()
    x = torch.linspace(-87, 88, 64 * LANES - 3)
    x = torch.cat((x, torch.tensor([float("-inf"), float("inf"), float("nan")])))
    want = x.double().clamp(-87, 88).exp()
    compiled(module)["powers"]((ctypes.c_int64 * 2)(x.data_ptr(), len(x)))
    torch.testing.assert_close(x.double(), want, rtol=3e-7, atol=0, equal_nan=True)


def test_a_result_other_than_the_reference_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    want = drawn(4)
    assert agrees("norm", lambda: (want, want))
    larger, never = want + 1, want * float("nan")
    assert not agrees("norm", lambda: (larger, want))
    assert not agrees("norm", lambda: (never, want))
    assert caplog.text.count("norm: LLVM differs from the reference by") == 2
