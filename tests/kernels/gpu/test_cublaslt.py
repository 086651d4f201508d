"""Products of many rows by algorithms of cuBLASLt, against float64."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, GPU

from tandem.kernels.gemm import cublaslt, linear, norm_gated, triton
from tandem.kernels.gemm.cublaslt import CublasError, Library, Shape
from tandem.kernels.gemm.table import Algorithm, algorithms_on
from tandem.kernels.norm import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU, reason="needs a GPU and its cuBLASLt"),
]
ERROR = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def operands(rows, outputs, inner, dtype):
    """x and weight, small enough that sums stay in the range of float16."""
    torch.manual_seed(7)
    x = torch.randn(rows, inner, device=DEVICE)
    return x.to(dtype), (torch.randn(outputs, inner, device=DEVICE) / inner**0.5).to(dtype)


def off(got, x, weight):
    """||got - want|| / ||want|| against float64."""
    want = x.double() @ weight.double().t()
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", list(ERROR))
def test_every_algorithm_multiplies_any_number_of_rows(dtype):
    """Also numbers of rows that the library was not asked about, each written wholly."""
    found = Library().all_products(Shape(1536, 1024, dtype))
    assert len(found) > 1
    for rows in (1, 129, 1000, 2049):
        x, weight = operands(rows, 1536, 1024, dtype)
        for algorithm, product in found.items():
            torch.full((rows, 1536), torch.nan, dtype=dtype, device=DEVICE)  # freed: out's memory
            assert off(product(x, weight), x, weight) < ERROR[dtype], (algorithm, rows)


def test_an_algorithm_is_chosen_by_name():
    """One that the library has is taken, one that it has not is left to torch."""
    x, weight = operands(2048, 1536, 1024, torch.bfloat16)
    for algorithm in Library().all_products(Shape(1536, 1024, x.dtype)):
        assert off(cublaslt.multiply(x, weight, algorithm), x, weight) < ERROR[x.dtype]
        assert cublaslt.multiply(x[:, :512], weight[:, :512], algorithm) is None
        assert cublaslt.multiply(x.float(), weight.float(), algorithm) is None
    assert cublaslt.multiply(x, weight, Algorithm(tile=9999, cluster=0)) is None


def test_ops_take_what_the_table_names(monkeypatch):
    """Product, product after a norm and gated product of many rows; one with a bias is torch's."""
    x, weight = operands(2048, 1536, 1024, torch.bfloat16)
    algorithm = next(iter(Library().all_products(Shape(1536, 1024, x.dtype))))
    asked, multiply = [], cublaslt.multiply

    def counted(*args):
        asked.append(args[2])
        return multiply(*args)

    monkeypatch.setattr(triton, "algorithm_for", lambda *_: algorithm)
    monkeypatch.setattr(cublaslt, "multiply", counted)
    assert off(linear(x, weight), x, weight) < ERROR[x.dtype]
    gain = torch.ones(1024, dtype=x.dtype, device=DEVICE)
    wide = rms_norm(x, gain, 1e-6).double() @ weight.double().t()
    want = torch.nn.functional.silu(wide[:, :768]) * wide[:, 768:]
    got = norm_gated(x, gain, 1e-6, weight)
    assert float((got.double() - want).norm() / want.norm()) < 3 * ERROR[x.dtype]
    assert asked == [algorithm] * 2
    linear(x, weight, weight[:, 0].contiguous())
    assert len(asked) == 2


def test_a_refusal_is_an_error_with_its_status():
    """Never a product that was not computed."""
    with pytest.raises(CublasError, match="cublasLtMatmul ended with status"):
        Library().call("cublasLtMatmul", *[None] * 13, 0, None)


@pytest.mark.skipif(
    not GPU or "H200" not in torch.cuda.get_device_name(), reason="the table is of an H200"
)
def test_the_table_names_what_the_library_has():
    """A table that outlived its library would be a slow path in silence."""
    ranges = algorithms_on(torch.device(DEVICE))
    assert ranges
    for (outputs, inner), chosen in ranges.items():
        offered = Library().all_products(Shape(outputs, inner, torch.bfloat16))
        assert {each for _, each in chosen if each is not None} <= offered.keys()
