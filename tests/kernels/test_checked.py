"""A wrong kernel is named when a model is loaded, and not used."""

import logging

import pytest
import torch

from tandem.kernels import Backend
from tandem.kernels.checked import comparing
from tandem.kernels.gemm import LINEAR, LINEAR_ADD, linear, linear_add, reference

CPU = torch.device("cpu")


@pytest.fixture
def own_choice():
    """Functions of a CPU are as before after the test."""
    yield
    LINEAR.use(CPU, LINEAR.load(Backend.TORCH))
    LINEAR_ADD.use(CPU, LINEAR_ADD.load(Backend.TORCH))


def half_of(x, weight, *rest):
    """Forget half of the inputs."""
    part = slice(x.shape[1] // 2)
    return reference.linear(x[:, part], weight[:, part], *rest)


def add_half_of(x, weight, residual):
    """Forget half of the inputs."""
    residual.add_(half_of(x, weight, None, residual.dtype))


def test_a_wrong_product_is_named_and_replaced(own_choice, caplog):
    """Results are right after it, and other products keep their kernel."""
    caplog.set_level(logging.WARNING)
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    LINEAR.use(CPU, half_of)
    with comparing(CPU) as wrong:
        linear(x, weight)
    assert wrong == ["gemm.linear"]
    (record,) = caplog.records
    assert "gemm.linear: the kernel for [3, 64], [32, 64] differs from" in record.getMessage()
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


def test_a_wrong_sum_is_found_beside_a_large_residual(own_choice):
    """The addend is compared, not the sum; x may be the residual."""
    LINEAR_ADD.use(CPU, add_half_of)
    stream, weight = torch.full((3, 64), 1e3), torch.randn(64, 64)
    with comparing(CPU) as wrong:
        linear_add(stream, weight, stream)
    assert wrong == ["gemm.linear_add"]


def test_a_kernel_that_does_not_build_is_replaced(own_choice, caplog):
    """Results of the comparison itself are right, too."""

    def broken(x, weight, residual):
        residual.zero_()
        raise RuntimeError("no such instruction")

    LINEAR_ADD.use(CPU, broken)
    stream, weight = torch.randn(3, 64), torch.randn(64, 64)
    sums = stream + stream @ weight.T
    with comparing(CPU) as wrong:
        linear_add(stream, weight, stream)
    assert wrong == ["gemm.linear_add"]
    assert "cannot run (no such instruction)" in caplog.text
    torch.testing.assert_close(stream, sums)


def test_a_right_kernel_stays(own_choice):
    """Also if its sums are in another order."""

    def doubles(x, weight, bias, dtype):
        return reference.linear(x.double(), weight.double(), bias, torch.float64).to(dtype)

    LINEAR.use(CPU, doubles)
    with comparing(CPU) as wrong:
        linear(torch.randn(3, 64), torch.randn(32, 64))
        linear(torch.randn(0, 64), torch.randn(32, 64))
    assert wrong == []
    assert LINEAR.on(CPU) is doubles
